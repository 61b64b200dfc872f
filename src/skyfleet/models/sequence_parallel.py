"""Sequence parallel (Ulysses): each rank runs the layers on some tokens, and attention on some heads.

Attention sees the whole pack, so shared prefixes stay shared. Jacobs et al. 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from skyfleet.errors import ModelError


class Attention(Protocol):
    """An `AttentionFn`."""

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor: ...


class SequenceParallel:
    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def keep(self, x: Tensor) -> Tensor:
        """This rank's rows of what every rank has."""
        own: Tensor = x.split(self._counts(len(x)))[self.rank]
        return own

    def gather(self, part: Tensor, n_rows: int) -> Tensor:
        """The rows of all ranks. The gradient of a row is the sum over the ranks that use it."""
        whole: Tensor = _GatherSum.apply(part, self._counts(n_rows), self.group)  # type: ignore[no-untyped-call]
        return whole

    def join(self, part: Tensor, n_rows: int) -> Tensor:
        """The rows of all ranks, of which all compute the same: a gradient is not summed."""
        whole: Tensor = _GatherSame.apply(part, self._counts(n_rows), self.group)  # type: ignore[no-untyped-call]
        return whole

    def wrap(self, attend: Attention, n_rows: int) -> Attention:
        """Attention over all rows: tokens are exchanged for heads, and back."""
        counts = self._counts(n_rows)

        def exchanged(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
            inputs = (_Exchange.apply(x, counts, self.group) for x in (q_THD, k_TKD, v_TKD))  # type: ignore[no-untyped-call]
            out_THD = attend(layer, *inputs)
            back: Tensor = _ExchangeBack.apply(out_THD, counts, self.group)  # type: ignore[no-untyped-call]
            return back

        return exchanged

    def _counts(self, n_rows: int) -> list[int]:
        """Rows per rank; a rank may have none."""
        each, more = divmod(n_rows, self.size)
        return [each + (rank < more) for rank in range(self.size)]


def check_heads(n_heads: int, n_kv_heads: int, size: int) -> None:
    """ModelError unless `size` ranks can share the heads of one rank evenly."""
    for name, n in (("attention heads", n_heads), ("key-value heads", n_kv_heads)):
        if n % size:
            raise ModelError(
                f"trainer.policy.sequence_parallel_size={size} does not divide the {n} {name} that "
                "a rank has with trainer.policy.tensor_parallel_size; use a divisor"
            )


class _Exchange(Function):
    """Own rows of all heads -> all rows of own heads."""

    @staticmethod
    def forward(ctx: Any, x_tHD: Tensor, counts: Sequence[int], group: Any) -> Tensor:
        ctx.counts, ctx.group = counts, group
        return _rows_to_heads(x_tHD, counts, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _heads_to_rows(grads[0], ctx.counts, ctx.group), None, None


class _ExchangeBack(Function):
    @staticmethod
    def forward(ctx: Any, x_ThD: Tensor, counts: Sequence[int], group: Any) -> Tensor:
        ctx.counts, ctx.group = counts, group
        return _heads_to_rows(x_ThD, counts, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _rows_to_heads(grads[0], ctx.counts, ctx.group), None, None


def _rows_to_heads(x_tHD: Tensor, counts: Sequence[int], group: Any) -> Tensor:
    n, size = len(x_tHD), len(counts)
    _, n_heads, width = x_tHD.shape
    own = n_heads // size
    given = x_tHD.view(n, size, own, width).transpose(0, 1).contiguous()
    taken = x_tHD.new_empty(sum(counts) * own * width)
    sizes = [count * own * width for count in counts]
    dist.all_to_all_single(taken, given.view(-1), sizes, [n * own * width] * size, group=group)
    return taken.view(sum(counts), own, width)


def _heads_to_rows(x_ThD: Tensor, counts: Sequence[int], group: Any) -> Tensor:
    size, (_, own, width) = len(counts), x_ThD.shape
    n = counts[dist.get_rank(group)]
    taken = x_ThD.new_empty(size * n * own * width)
    sizes = [count * own * width for count in counts]
    dist.all_to_all_single(
        taken, x_ThD.contiguous().view(-1), [n * own * width] * size, sizes, group=group
    )
    return taken.view(size, n, own, width).transpose(0, 1).reshape(n, size * own, width)


class _GatherSum(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, counts: Sequence[int], group: Any) -> Tensor:
        ctx.counts, ctx.group = counts, group
        return _gather_rows(part, counts, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.split(ctx.counts)[dist.get_rank(ctx.group)], None, None


class _GatherSame(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, counts: Sequence[int], group: Any) -> Tensor:
        ctx.rows = counts, dist.get_rank(group)
        return _gather_rows(part, counts, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        counts, rank = ctx.rows
        return grads[0].split(counts)[rank], None, None


def _gather_rows(part: Tensor, counts: Sequence[int], group: Any) -> Tensor:
    """Padded, because collectives want equal sizes."""
    widest = max(counts)
    padded = part.new_zeros(widest, *part.shape[1:])
    padded[: len(part)] = part
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([x[:count] for x, count in zip(parts, counts, strict=True)])
