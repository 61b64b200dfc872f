"""EngineSync: weights from the learner to engine actors, also to one that was started again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from skyfleet.algorithms.sample import Sample
from skyfleet.cluster.engine_actors import GroupPlace
from skyfleet.cluster.ray_calls import ActorLostError
from skyfleet.cluster.ray_engine import RayEngine
from skyfleet.engines.engine import Engine
from skyfleet.errors import ClusterError, EngineLostError
from skyfleet.learner.learner import Learner, StepReport
from skyfleet.weight_sync.broadcast import BroadcastSync, Send
from skyfleet.weight_sync.sync import WeightSync
from skyfleet.weight_transfer.buckets import TransferReport
from skyfleet.weight_transfer.sender import WeightSender

logger = logging.getLogger(__name__)

TRANSFER_SECONDS = 120.0
"""A receiver that does not answer for so long is lost."""
MAX_TRIES = 5
"""Pushes that an engine's death may interrupt, one after another."""


class Sender(Protocol):
    """Rank 0 of a transfer group, in the process that has the weights. Its methods block."""

    address: str

    def send(self, version: int) -> TransferReport: ...

    def close(self) -> None: ...


OpenSender = Callable[[dict[str, Any]], Sender]
"""Opens a group with the keyword arguments of `WeightSender`."""


class DriverSender:
    """Sends the weights of a learner in the driver."""

    def __init__(self, weights: WeightsLock, options: dict[str, Any]) -> None:
        self._weights, self._sender = weights, WeightSender(**options)
        self.address = self._sender.address

    def send(self, version: int) -> TransferReport:
        assert self._weights.learner is not None
        return self._sender.send(self._weights.learner.named_weights(), version=version)

    def close(self) -> None:
        self._sender.close()


class WeightsLock:
    """Held while weights change and while they are sent, so that no engine gets half an update."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.learner: Learner | None = None
        """Set once it is built: engines that are started again get its weights."""


class GuardedLearner:
    """A learner whose updates hold the lock."""

    def __init__(self, learner: Learner, weights: WeightsLock) -> None:
        self._learner, self._lock = learner, weights.lock
        weights.learner = learner

    @property
    def policy_version(self) -> int:
        return self._learner.policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self._learner.policy_version = version

    @property
    def is_within_update(self) -> bool:
        return self._learner.is_within_update

    async def step(self, samples: Sequence[Sample]) -> StepReport:
        async with self._lock:
            return await self._learner.step(samples)

    async def sft_step(self, samples: Sequence[Sample]) -> StepReport:
        async with self._lock:
            return await self._learner.sft_step(samples)

    def renew_reference(self) -> None:
        self._learner.renew_reference()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._learner.named_weights()

    def save(self, folder: Path) -> None:
        self._learner.save(folder)

    def load(self, folder: Path) -> None:
        self._learner.load(folder)


class EngineSync:
    """One transfer group over all engines; a new one when an engine was started again."""

    def __init__(
        self, weights: WeightsLock, open_sender: OpenSender, sender_options: dict[str, Any]
    ) -> None:
        self._weights, self._open_sender, self._options = weights, open_sender, sender_options
        self._sender: Sender | None = None
        self._members: list[tuple[RayEngine, int]] = []
        """With their processes."""
        self.report: TransferReport | None = None

    async def push(self, learner: Learner, engines: Sequence[Engine]) -> int:
        """Engines that are being started again get the same weights when they are up."""
        ours = [engine for engine in engines if isinstance(engine, RayEngine)]
        async with self._weights.lock:
            for attempt in range(MAX_TRIES):
                members = [engine for engine in ours if engine.has_process]
                try:
                    if members:
                        await self._push_to(learner, members)
                    break
                except (ActorLostError, EngineLostError) as error:
                    # The engine notes its loss itself and starts again.
                    logger.warning("the weight sync is repeated: %s", error)
                    self._close_group()
                    await asyncio.sleep(float(attempt))
            else:
                raise EngineLostError(
                    f"engines died in {MAX_TRIES} weight syncs in a row",
                    "see the logs of Ray, then run the same command to resume",
                )
        for engine in ours:
            engine.policy_version = learner.policy_version
        return learner.policy_version

    async def verify(self, engines: Sequence[Engine]) -> None:
        """Nothing else writes to an engine, and each push was verified."""

    async def restore(self, engine: RayEngine) -> None:
        """Give one engine the current weights, through a group of its own."""
        async with self._weights.lock:
            learner = self._weights.learner
            if learner is None:
                raise ClusterError(f"{engine.name} died before the learner was built")
            sender = await self._open_group([engine])
            try:
                await BroadcastSync(_send_with(sender)).push(learner, [engine])
            finally:
                await asyncio.to_thread(sender.close)

    async def close(self) -> None:
        self._close_group()

    async def _push_to(self, learner: Learner, members: Sequence[RayEngine]) -> None:
        processes = [(engine, engine.process_id) for engine in members]
        if self._sender is None or processes != self._members:
            self._close_group()
            self._sender = await self._open_group(members)
            self._members = processes
        sync = BroadcastSync(_send_with(self._sender))
        await sync.push(learner, members)
        self.report = sync.report

    async def _open_group(self, members: Sequence[RayEngine]) -> Sender:
        world_size = len(members) + 1
        options = {
            **self._options,
            "world_size": world_size,
            "timeout_seconds": TRANSFER_SECONDS,
        }
        sender = await asyncio.to_thread(self._open_sender, options)
        places = (
            GroupPlace(
                address=sender.address,
                rank=rank,
                world_size=world_size,
                backend=self._options["backend"],
                timeout_seconds=TRANSFER_SECONDS,
            )
            for rank in range(1, world_size)
        )
        try:
            joins = (engine.join(p) for engine, p in zip(members, places, strict=True))
            await asyncio.gather(*joins)
        except BaseException:
            sender.close()
            raise
        return sender

    def _close_group(self) -> None:
        sender, self._sender, self._members = self._sender, None, []
        if sender is not None:
            with suppress(RuntimeError):
                sender.close()


def _send_with(sender: Sender) -> Send:
    async def send(_: Learner, version: int) -> TransferReport:
        return await asyncio.to_thread(sender.send, version)

    return send


class VllmEngineSync:
    """`VllmSync` under the lock, and for single engines that were started again."""

    def __init__(self, sync: WeightSync, weights: WeightsLock) -> None:
        self._sync, self._weights = sync, weights

    @property
    def report(self) -> TransferReport | None:
        report: TransferReport | None = getattr(self._sync, "report", None)
        return report

    async def push(self, learner: Learner, engines: Sequence[Engine]) -> int:
        async with self._weights.lock:
            return await self._sync.push(learner, engines)

    async def verify(self, engines: Sequence[Engine]) -> None:
        await self._sync.verify(engines)

    async def restore(self, engine: RayEngine) -> None:
        async with self._weights.lock:
            if self._weights.learner is not None:
                await self._sync.push(self._weights.learner, [engine])
