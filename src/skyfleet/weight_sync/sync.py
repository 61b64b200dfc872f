"""WeightSync: new weights reach the engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import nn

from skyfleet.config.root import RunConfig
from skyfleet.engines.engine import Engine
from skyfleet.engines.engine_pool import Router
from skyfleet.learner.learner import Learner
from skyfleet.models.lora import merged_state


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


def build_weight_sync(config: RunConfig, module: nn.Module, engine: Engine) -> WeightSync:
    """How weights of `module` get to `engine`, which may be a pool."""
    if config.generator.backend == "embedded":
        return InProcessSync()
    from skyfleet.weight_sync.vllm import VllmSync

    sync = VllmSync(lambda: merged_state(module).items(), folder=config.generator.weight_sync_dir)
    return PausedSync(sync, engine) if isinstance(engine, Router) else sync
