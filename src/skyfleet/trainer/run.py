"""Run: everything one run needs, already built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyfleet.algorithms.advantages import Estimator
from skyfleet.algorithms.filters import FilterResult
from skyfleet.algorithms.sample import Sample
from skyfleet.checkpoints.checkpoint import Saveable
from skyfleet.engines.engine import Engine
from skyfleet.envs.env import EnvFactory
from skyfleet.learner.learner import Learner
from skyfleet.rollouts.conversation import AgentFactory
from skyfleet.rollouts.episode import Limits
from skyfleet.sentinels.checker import InvariantChecker
from skyfleet.tasks.sampling import Sampler
from skyfleet.tracking.console import ConsoleTracker
from skyfleet.tracking.step_log import StepLog
from skyfleet.trainer.evals import Evals
from skyfleet.trainer.exports import Exports
from skyfleet.trainer.schedule import Schedule
from skyfleet.trainer.state import TrainerState
from skyfleet.trajectories.trajectory import Group
from skyfleet.weight_sync.sync import WeightSync


@dataclass(slots=True)
class Place:
    """Where an interrupted run goes on."""

    data: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    folder: Path
    checkpoints: Path
    seed: int
    schedule: Schedule
    state: TrainerState
    sampler: Sampler
    evals: Evals
    open_env: EnvFactory
    policy: Callable[[int], AgentFactory]
    """The policy as it samples at a given step: the same step draws the same tokens."""
    limits: Limits
    n_samples: int
    max_concurrent: int
    """Episodes at once."""
    filter_groups: Callable[[Sequence[Group]], FilterResult]
    estimate: Estimator
    mask_unfinished: bool
    learner: Learner
    critic: Saveable | None
    """The learner's, which is kept beside it."""
    engines: Sequence[Engine]
    sync: WeightSync
    resting: Callable[[], AbstractAsyncContextManager[None]]
    """While learning: engines that hold memory which the learner needs give it up."""
    watch: InvariantChecker
    log: StepLog
    console: ConsoleTracker
    exports: Exports
    demonstrations: Sequence[Sample] = field(default=())
    """What the warm start imitates."""
    warm_start_batch_size: int = 32
    opened: AsyncExitStack = field(default_factory=AsyncExitStack)
    """What ends with the run: engines that have processes or connections."""

    place: Place = field(default_factory=Place)

    def reach(self) -> None:
        """An interruption keeps what is done up to here; the rest is done again on resume."""
        self.place.data, self.place.metrics = self.sampler.state_dict(), self.log.pending

    async def close(self) -> None:
        self.log.close()
        await self.opened.aclose()
