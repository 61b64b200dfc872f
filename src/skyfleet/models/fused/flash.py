"""Flash attention over sequences laid end to end, and rows that several of them share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from skyfleet.models.fused.functions import kernels

WIDTHS = (16, 32, 64, 128)
"""Of heads that the kernels are made for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """Where each sequence ends among queries and among keys, after a leading 0; and the longest."""

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int

    @classmethod
    def of(cls, queries: np.ndarray, keys: np.ndarray, device: torch.device) -> Ends:
        """From how many queries and keys each sequence has."""
        return cls(
            queries=torch.from_numpy(running_ends(queries)).to(device),
            keys=torch.from_numpy(running_ends(keys)).to(device),
            most_queries=int(queries.max()),
            most_keys=int(keys.max()),
        )


def running_ends(lengths: np.ndarray) -> np.ndarray:
    """Where each of several ends that lie end to end, after a leading 0."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRows:
    """Which row each place takes, and for each row its places, from `starts[r]` to `starts[r+1]`."""

    rows_L: Tensor
    starts_R: Tensor
    places_L: Tensor


def flash_varlen(q_THD: Tensor, k_LKD: Tensor, v_LKD: Tensor, ends: Ends) -> Tensor:
    """Causal attention of sequences laid end to end, without padding; 16-bit types on CUDA.

    A sequence with more keys than queries is read from its end: the last query sees every key.
    """
    out_THD: Tensor = _FlashVarlen.apply(q_THD, k_LKD, v_LKD, ends)  # type: ignore[no-untyped-call]
    return out_THD


def take_shared(x_TX: Tensor, shared: SharedRows) -> Tensor:
    """`x[rows]`, whose gradient is the same sum in the same order every time."""
    taken_LX: Tensor = _TakeShared.apply(x_TX, shared)  # type: ignore[no-untyped-call]
    return taken_LX


class _FlashVarlen(Function):
    @staticmethod
    def forward(ctx: Any, q_THD: Tensor, k_LKD: Tensor, v_LKD: Tensor, ends: Ends) -> Tensor:
        out, total = kernels(q_THD.device, "products").read(
            q_THD, k_LKD, v_LKD, ends.queries, ends.keys, ends.most_queries
        )
        ctx.save_for_backward(q_THD, k_LKD, v_LKD, out, total)
        ctx.ends = ends
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_LKD, v_LKD, out, total = ctx.saved_tensors
        ends: Ends = ctx.ends
        dq, dk, dv = kernels(q_THD.device, "gradient").read_back(
            grads[0].contiguous(), q_THD, k_LKD, v_LKD, out, total,
            ends.queries, ends.keys, ends.most_queries, ends.most_keys,
        )  # fmt: skip
        return dq, dk, dv, None


class _TakeShared(Function):
    @staticmethod
    def forward(ctx: Any, x_TX: Tensor, shared: SharedRows) -> Tensor:
        ctx.shared = shared
        return x_TX.index_select(0, shared.rows_L)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        shared: SharedRows = ctx.shared
        folded: Tensor = kernels(grads[0].device, "scores").fold(
            grads[0].contiguous(), shared.starts_R, shared.places_L
        )
        return folded, None
