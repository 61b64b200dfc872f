"""WeightSync: new weights reach the engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from skyfleet.engines.engine import Engine
from skyfleet.learner.learner import Learner


class WeightSync(Protocol):
    async def push(self, learner: Learner, engines: Sequence[Engine]) -> int:
        """Returns the policy version every engine now serves."""
        ...


class InProcessSync:
    """Engine and learner hold the same tensors: only the version has to move."""

    async def push(self, learner: Learner, engines: Sequence[Engine]) -> int:
        for engine in engines:
            engine.policy_version = learner.policy_version
        return learner.policy_version
