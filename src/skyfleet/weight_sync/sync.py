"""WeightSync: new weights reach the engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from skyfleet.engines.engine import Engine
from skyfleet.engines.engine_pool import Router
from skyfleet.learner.learner import Learner


class WeightSync(Protocol):
    async def push(self, learner: Learner, engines: Sequence[Engine]) -> int:
        """Returns the policy version every engine now serves."""
        ...

    async def confirm(self, engines: Sequence[Engine]) -> None:
        """SentinelError where one has spoken since the last push with other weights than came."""
        ...


class InProcessSync:
    """Engine and learner hold the same tensors: only the version has to move."""

    async def push(self, learner: Learner, engines: Sequence[Engine]) -> int:
        for engine in engines:
            engine.policy_version = learner.policy_version
        return learner.policy_version

    async def confirm(self, engines: Sequence[Engine]) -> None: ...


class PausedSync:
    """No turn begins while weights travel; one that is broken off for them goes on afterwards."""

    def __init__(self, sync: WeightSync, router: Router) -> None:
        self._sync, self._router = sync, router

    async def push(self, learner: Learner, engines: Sequence[Engine]) -> int:
        async with self._router.paused(wait=False):
            return await self._sync.push(learner, engines)

    async def confirm(self, engines: Sequence[Engine]) -> None:
        await self._sync.confirm(engines)
