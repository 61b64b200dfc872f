"""The shape of a layer's heads, as its kernels need it, and how many keys they meet at once."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

KEY_BLOCK = 64
"""Keys that a query meets at once, read, decoded or learnt: sums in one order are the same bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    queries: int
    keys: int
    """Key heads, and as many of values."""
    width: int
    norms: tuple[Tensor, Tensor] | None
    """Weights of the norms over queries and keys, where the model has them."""
    eps: float
