"""Run: everything one run needs, already built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from skyfleet.algorithms.advantages import Estimator
from skyfleet.algorithms.filters import Kept
from skyfleet.algorithms.sample import Sample
from skyfleet.engines.engine import Engine
from skyfleet.envs.env import EnvFactory
from skyfleet.learner.learner import Learner
from skyfleet.rollouts.conversation import Policy
from skyfleet.rollouts.limits import Limits
from skyfleet.tasks.sampling import TaskSampler
from skyfleet.tasks.task import Task
from skyfleet.tracking.console import ConsoleTracker
from skyfleet.tracking.step_log import StepLog
from skyfleet.trainer.state import TrainerState
from skyfleet.trajectories.trajectory import Group
from skyfleet.weight_sync.sync import WeightSync


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When things happen, in steps."""

    total_steps: int
    warm_start_steps: int = 0
    eval_before_train: bool = True
    eval_interval: int = -1
    ckpt_interval: int = -1
    max_ckpts_to_keep: int = -1

    def evaluates_at(self, step: int) -> bool:
        """Step 0 is before training. With an interval, the last step is always evaluated."""
        if step == 0:
            return self.eval_before_train
        return self.eval_interval > 0 and self._due(step, self.eval_interval)

    def saves_at(self, step: int) -> bool:
        return self._due(step, self.ckpt_interval)

    def _due(self, step: int, interval: int) -> bool:
        return step == self.total_steps or (interval > 0 and step % interval == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    folder: Path
    checkpoints: Path
    schedule: Schedule
    state: TrainerState
    sampler: TaskSampler
    eval_sets: Mapping[str, Sequence[Task]]
    open_env: EnvFactory
    policy: Callable[[int], Policy]
    """The policy as it samples at a given step: the same step draws the same tokens."""
    eval_policy: Policy
    limits: Limits
    n_samples: int
    eval_n_samples: int
    max_concurrent: int
    """Episodes at once."""
    sift: Callable[[Sequence[Group]], Kept]
    estimate: Estimator
    mask_unfinished: bool
    learner: Learner
    engines: Sequence[Engine]
    sync: WeightSync
    log: StepLog
    console: ConsoleTracker
    demonstrations: Sequence[Sample] = field(default=())
    """What the warm start imitates."""
    warm_start_batch_size: int = 32
