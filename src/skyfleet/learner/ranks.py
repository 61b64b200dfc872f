"""Ranks: how the processes of one learner divide a mini-batch and join what they computed.

The update code is the same for one process and for many. What differs is here; with one process
everything is the identity.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from torch import Tensor, nn

from skyfleet.algorithms.sample import Sample
from skyfleet.models.lora import merged_state_dict

T = TypeVar("T")


class Ranks:
    """One process."""

    size = 1
    """Ranks that divide the samples; those of one tensor or sequence group have the same ones."""

    rank = 0
    is_first = True
    is_sharded = False
    n_tensor_ranks = 1
    dcp: Mapping[str, Any] = MappingProxyType({"no_dist": True})
    """How torch.distributed.checkpoint finds the other ranks."""

    def share(self, samples: Sequence[Sample]) -> Sequence[int]:
        """The indices of this rank's samples, in their order."""
        return range(len(samples))

    def gather(self, value: T) -> list[T]:
        """The value of every rank that divides the samples, in the order of ranks."""
        return [value]

    def wait(self) -> None:
        """Until every rank is here."""

    def shard_key(self, name: str) -> str:
        """The name of a tensor in a checkpoint to which every rank writes its part."""
        return name

    def as_shard(self, parameter: nn.Parameter, local: Tensor) -> Tensor:
        """A tensor of this rank that is divided as the parameter is."""
        return local

    def gather_parameter(self, parameter: nn.Parameter) -> Tensor:
        """The whole parameter; every rank takes part."""
        return parameter.detach()

    def keep_part(self, parameter: nn.Parameter, local: Tensor, whole: Tensor) -> None:
        """Copy this rank's part of a whole tensor that is divided as the parameter is."""
        local.copy_(whole)

    def largest(self, number: int) -> int:
        return max(self.gather(number))

    def local(self, tensor: Tensor) -> Tensor:
        """This rank's part of a parameter or its gradient; it shares the memory."""
        return tensor

    def complete_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """After the backward passes of an update: sum over ranks what is not summed yet."""

    def whole_gradients(
        self, named: Iterable[tuple[str, nn.Parameter]]
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Whole parameters with whole gradients, one after another."""
        yield from named

    def whole_weights(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Each whole weight with adapters merged, one after another; every rank takes them all."""
        yield from merged_state_dict(module).items()

    def clip(self, parameters: Sequence[nn.Parameter], limit: float) -> float:
        """Scale the gradients to a norm of at most `limit`; return the norm before."""
        return float(nn.utils.clip_grad_norm_(parameters, limit))

    def sum(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Shares of metrics, such as sums over the tokens of a rank."""
        totals: dict[str, float] = defaultdict(float)
        for part in self.gather(metrics):
            for name, value in part.items():
                totals[name] += value
        return dict(totals)


ONE_RANK = Ranks()


def join_rows(parts: Iterable[Mapping[int, list[float]]], n_samples: int) -> list[list[float]]:
    """Values by sample of all ranks, in the order of samples; a sample without any has none."""
    rows: list[list[float]] = [[] for _ in range(n_samples)]
    for part in parts:
        for index, values in part.items():
            rows[index] = values
    return rows


def divide_samples(samples: Sequence[Sample], n_ranks: int) -> list[list[int]]:
    """Sample indices per rank, balanced by the tokens that a rank computes.

    Samples of a task stay together, because their shared prompt is computed once; a task with more
    than a rank's part of the tokens is cut.
    """
    by_task: dict[str, list[int]] = defaultdict(list)
    for index, sample in enumerate(samples):
        by_task[sample.task_key].append(index)
    total = sum(_count_tokens([samples[i] for i in task]) for task in by_task.values())
    pieces: list[list[int]] = []
    for task in by_task.values():
        tokens = _count_tokens([samples[i] for i in task])
        n_pieces = min(len(task), math.ceil(tokens * n_ranks / max(total, 1)))
        each = math.ceil(len(task) / max(n_pieces, 1))
        pieces += [task[first : first + each] for first in range(0, len(task), each)]
    costs = [_count_tokens([samples[i] for i in piece]) for piece in pieces]
    loads, shares = [0] * n_ranks, [list[int]() for _ in range(n_ranks)]
    for piece, cost in sorted(
        zip(pieces, costs, strict=True), key=lambda pair: (-pair[1], pair[0][0])
    ):
        rank = loads.index(min(loads))
        loads[rank] += cost
        shares[rank] += piece
    return [sorted(share) for share in shares]


def _count_tokens(samples: Sequence[Sample]) -> int:
    """Tokens of one task, without those of the prefix that all samples share."""
    first = samples[0].token_ids
    shared = min(len(s.token_ids) for s in samples)
    for sample in samples[1:]:
        pairs = zip(first[:shared], sample.token_ids[:shared], strict=True)
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), shared)
    return sum(len(s.token_ids) for s in samples) - shared * (len(samples) - 1)
