"""Differentiable flash attention over packed sequences, and gathering of shared rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from skyfleet.models.fused.ops import kernels

HEAD_DIMS = (16, 32, 64, 128)
"""Head dimensions that the kernels support."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CuSeqlens:
    """Cumulative sequence lengths of queries and keys, with a leading 0, and the longest of
    each."""

    queries: Tensor
    keys: Tensor
    max_queries: int
    max_keys: int

    @classmethod
    def from_lengths(cls, queries: np.ndarray, keys: np.ndarray, device: torch.device) -> CuSeqlens:
        """`queries` and `keys` are the lengths of each sequence."""
        return cls(
            queries=torch.from_numpy(cumulative_lengths(queries)).to(device),
            keys=torch.from_numpy(cumulative_lengths(keys)).to(device),
            max_queries=int(queries.max()),
            max_keys=int(keys.max()),
        )


def cumulative_lengths(lengths: np.ndarray) -> np.ndarray:
    """Cumulative sum with a leading 0."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRows:
    """Place l takes row `rows_L[l]`; row r is used by `places_L[starts_R[r]:starts_R[r + 1]]`."""

    rows_L: Tensor
    starts_R: Tensor
    places_L: Tensor


def flash_varlen(q_THD: Tensor, k_LKD: Tensor, v_LKD: Tensor, cu_seqlens: CuSeqlens) -> Tensor:
    """Causal attention over packed sequences without padding; 16-bit dtypes on CUDA only.

    If a sequence has more keys than queries, the queries are its last tokens.
    """
    out_THD: Tensor = _FlashVarlen.apply(q_THD, k_LKD, v_LKD, cu_seqlens)  # type: ignore[no-untyped-call]
    return out_THD


def gather_shared_rows(x_TX: Tensor, shared: SharedRows) -> Tensor:
    """`x[rows]` with a deterministic gradient: it sums in the same order every time."""
    taken_LX: Tensor = _GatherSharedRows.apply(x_TX, shared)  # type: ignore[no-untyped-call]
    return taken_LX


class _FlashVarlen(Function):
    @staticmethod
    def forward(
        ctx: Any, q_THD: Tensor, k_LKD: Tensor, v_LKD: Tensor, cu_seqlens: CuSeqlens
    ) -> Tensor:
        out, lse = kernels(q_THD.device, "flash_attention").flash_forward(
            q_THD, k_LKD, v_LKD, cu_seqlens.queries, cu_seqlens.keys, cu_seqlens.max_queries
        )
        ctx.save_for_backward(q_THD, k_LKD, v_LKD, out, lse)
        ctx.cu_seqlens = cu_seqlens
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_LKD, v_LKD, out, lse = ctx.saved_tensors
        cu_seqlens: CuSeqlens = ctx.cu_seqlens
        dq, dk, dv = kernels(q_THD.device, "flash_attention").flash_backward(
            grads[0].contiguous(), q_THD, k_LKD, v_LKD, out, lse,
            cu_seqlens.queries, cu_seqlens.keys, cu_seqlens.max_queries, cu_seqlens.max_keys,
        )  # fmt: skip
        return dq, dk, dv, None


class _GatherSharedRows(Function):
    @staticmethod
    def forward(ctx: Any, x_TX: Tensor, shared: SharedRows) -> Tensor:
        ctx.shared = shared
        return x_TX.index_select(0, shared.rows_L)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        shared: SharedRows = ctx.shared
        summed: Tensor = kernels(grads[0].device, "flash_attention").sum_shared_rows(
            grads[0].contiguous(), shared.starts_R, shared.places_L
        )
        return summed, None
