"""The shape of a layer's heads, as its kernels need it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    queries: int
    keys: int
    """Key heads, and as many of values."""
    width: int
    norms: tuple[Tensor, Tensor] | None
    """Weights of the norms over queries and keys, where the model has them."""
    eps: float
