"""The attention heads of a layer, and the key block that all attention kernels share."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

KEY_BLOCK = 64
"""Keys per step of every attention kernel (prefill, decoding, learner): one order of sums, same
bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLayout:
    n_heads: int
    n_kv_heads: int
    head_dim: int
    norms: tuple[Tensor, Tensor] | None
    """Weights of the RMS norms over queries and keys, where the model has them."""
    eps: float
