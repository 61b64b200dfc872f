"""ShardedLearner: a learner whose ranks run in several processes, as the training loop sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from skyfleet.algorithms.sample import Sample
from skyfleet.learner.learner import StepReport
from skyfleet.learner.loss_recorder import LossRecord, LossRecorder
from skyfleet.learner.rank_worker import RankReport


class RankGroup(Protocol):
    """The `RankWorker` of every rank. One thread at a time calls it, and every call blocks."""

    @property
    def world_size(self) -> int: ...

    def call(self, method: str, *arguments: Any) -> Any:
        """Call the method on every rank with the same arguments; return what rank 0 returns.

        An exception of a rank is raised here. LearnerLostError if a rank died or has not answered
        within the deadline; every later call raises it too.
        """
        ...

    def iterate(self, method: str) -> Iterator[Any]:
        """Run the generator on every rank to its end, and yield what rank 0 yields."""
        ...

    def close(self) -> None:
        """End every rank, also one that hangs."""
        ...


class ShardedLearner:
    """The `Learner` protocol over a `RankGroup`. It holds no tensors."""

    def __init__(
        self,
        group: RankGroup,
        *,
        reference_folder: Callable[[], Path] | None = None,
        losses: LossRecorder | None = None,
    ) -> None:
        """`reference_folder` returns the folder of the KL reference, if there is one.

        `losses` gets the inputs of the loss on all ranks, for the sentinels.
        """
        self._group, self._find_reference, self._losses = group, reference_folder, losses
        self._has_reference = reference_folder is None
        self.policy_version = 0
        self._is_within_update = False

    @property
    def is_within_update(self) -> bool:
        return self._is_within_update

    async def step(self, samples: Sequence[Sample]) -> StepReport:
        if not self._has_reference:
            assert self._find_reference is not None
            await _finish_in_thread(
                partial(self._group.call, "set_reference", self._find_reference())
            )
            self._has_reference = True
        return await self._update("step", samples)

    async def sft_step(self, samples: Sequence[Sample]) -> StepReport:
        return await self._update("sft_step", samples)

    def renew_reference(self) -> None:
        self._has_reference = self._find_reference is None

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._group.iterate("named_weights")

    def save(self, folder: Path) -> None:
        self._group.call("save", folder.absolute())

    def load(self, folder: Path) -> None:
        if self._find_reference is not None:  # a learner that has begun to learn loads it at once
            self._group.call("set_reference", self._find_reference())
        self.policy_version = self._group.call("load", folder.absolute())

    def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder."""
        self._group.call("export", folder.absolute())

    def close(self) -> None:
        self._group.close()

    async def _update(self, method: str, samples: Sequence[Sample]) -> StepReport:
        self._is_within_update = True
        reply: RankReport = await _finish_in_thread(
            partial(self._group.call, method, list(samples), self.policy_version)
        )
        if reply.error is not None:
            self._is_within_update = reply.is_within_update
            raise reply.error
        assert reply.report is not None
        if self._losses is not None:
            self._losses.add(LossRecord.join(reply.losses))
        self.policy_version, self._is_within_update = reply.report.policy_version, False
        return reply.report


class ShardedCritic:
    """The critic's part of a checkpoint; the ranks hold the critic itself."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def save(self, folder: Path) -> None:
        self._group.call("save_critic", folder.absolute())

    def load(self, folder: Path) -> None:
        self._group.call("load_critic", folder.absolute())


async def _finish_in_thread(call: Callable[[], Any]) -> Any:
    """A cancellation takes effect after the call: half an update must not be saved."""
    result = asyncio.ensure_future(asyncio.to_thread(call))
    task, n_cancelled = asyncio.current_task(), 0
    assert task is not None
    while not result.done():
        try:
            await asyncio.wait([result])
        except asyncio.CancelledError:
            n_cancelled += 1
            task.uncancel()
    for _ in range(n_cancelled):
        task.cancel()
    return result.result()
