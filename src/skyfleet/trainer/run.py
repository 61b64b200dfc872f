"""Run: the components of one training run, already built, and where it resumes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from skyfleet.algorithms.sample import Sample
from skyfleet.checkpoints.checkpoint import Checkpoint, JsonPart, Saveable, Stateful
from skyfleet.checkpoints.saving import save_checkpoint
from skyfleet.engines.engine import Engine
from skyfleet.engines.factory import EngineOffload
from skyfleet.learner.learner import Learner
from skyfleet.sentinels.checker import InvariantChecker
from skyfleet.storage.bucket_lock import BucketLock
from skyfleet.storage.folder_lock import FolderLock
from skyfleet.tracking.background import RunState
from skyfleet.tracking.console import ConsoleTracker
from skyfleet.tracking.step_log import StepLog
from skyfleet.tracking.tracing import RolloutTracer
from skyfleet.trainer.alerting import RunAlerts
from skyfleet.trainer.callbacks import Callbacks
from skyfleet.trainer.evaluation import Evaluator
from skyfleet.trainer.exports import Exports
from skyfleet.trainer.group_rollouts import GroupRollouts
from skyfleet.trainer.journal import Journal
from skyfleet.trainer.rollouts import RolloutCollector
from skyfleet.trainer.tasks import Schedule
from skyfleet.trainer.uploads import RunUploads
from skyfleet.trajectories.trajectory import Group
from skyfleet.weight_sync.sync import WeightSync, find_report

_SAVE_TIMINGS = frozenset({"timing/save_checkpoints", "timing/save_hf_model"})


@dataclass(slots=True)
class TrainerState:
    """The progress of a run, as a checkpoint stores it."""

    step: int = 0
    """Reinforcement-learning steps the learner has finished."""
    warm_start_step: int = 0
    logged_step: int = -1
    """The last row in metrics.jsonl; 0 is the evaluation before training."""
    evaluated_steps: list[int] = field(default_factory=list)
    best_step: int = 0
    """The best of the evaluated steps."""
    reference_step: int = 0
    """The checkpoint whose policy is the KL reference."""
    pending_metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of an interrupted step that were not logged yet."""

    fitted_settings: dict[str, Sequence[Any]] = field(default_factory=dict)
    """What was lowered to fit into memory: see `refit_memory`."""
    run_id: str = ""
    """The run's identity in its journal; empty in checkpoints of earlier versions."""
    sent_alerts: dict[str, Any] = field(default_factory=dict)
    """By receiver: its thread and the alerts that it has, for a run that resumes elsewhere."""
    config: str = ""
    """config.yaml without paths, for a run that has lost the file; empty in earlier versions."""
    open_groups: dict[str, Any] = field(default_factory=dict)
    """Of an asynchronous run: what is drawn and not trained on (`OpenGroups`)."""
    eval_sets: dict[str, str] = field(default_factory=dict)
    """The hash of each evaluation set by name; empty in checkpoints of earlier versions."""
    grading_code: dict[str, Any] = field(default_factory=dict)
    """A `GradingCode`; empty if it is not known, as in checkpoints of earlier versions."""

    def take_pending_metrics(self) -> dict[str, float]:
        """The metrics that the next row starts with."""
        pending, self.pending_metrics = self.pending_metrics, {}
        if self.logged_step < self.step:
            return pending
        # Of the next step nothing is kept but what saving the last one took. Checkpoints of earlier
        # versions may have the metrics of a row that was logged already.
        return {name: value for name, value in pending.items() if name in _SAVE_TIMINGS}

    def state_dict(self) -> dict[str, Any]:
        state = asdict(self)
        for name in ("fitted_settings", "sent_alerts", "open_groups"):
            if not state[name]:
                del state[name]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


@dataclass(slots=True)
class ResumePoint:
    """The sampler state and metrics from which an interrupted run resumes."""

    data: Mapping[str, Any] = field(default_factory=dict)
    open_groups: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    policy_version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Inference:
    """The engines that sample, and how they get new weights."""

    engines: Sequence[Engine]
    sync: WeightSync
    offload: EngineOffload
    """Context of an update: engines that share the learner's GPU sleep inside it."""

    async def push(self, learner: Learner) -> int:
        return await self.sync.push(learner, self.engines)

    async def verify(self) -> None:
        await self.sync.verify(self.engines)

    @property
    def sync_metrics(self) -> dict[str, float]:
        """Of the last push; empty if it copied nothing."""
        report = find_report(self.sync)
        return {} if report is None else report.metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """Supervised fine-tuning before reinforcement learning."""

    demonstrations: Sequence[Sample] = ()
    batch_size: int = 32
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    folder: Path
    checkpoints: Path
    schedule: Schedule
    state: TrainerState
    rollouts: RolloutCollector
    compute_samples: Callable[[Sequence[Group]], list[Sample]]
    """Credit assignment: graded groups to samples with advantages."""
    learner: Learner
    critic: Saveable | None
    inference: Inference
    evaluator: Evaluator
    checker: InvariantChecker
    log: StepLog
    console: ConsoleTracker
    exports: Exports
    journal: Journal
    warm_start: WarmStart
    callbacks: Callbacks = field(default_factory=Callbacks)
    alerts: RunAlerts = field(default_factory=RunAlerts)
    tracer: RolloutTracer | None = None
    opened: AsyncExitStack = field(default_factory=AsyncExitStack)
    """Engine processes and connections, closed with the run."""
    resume_point: ResumePoint = field(default_factory=ResumePoint)
    locks: Sequence[FolderLock | BucketLock] = ()
    """Of the folders and buckets that the run writes to."""
    uploads: RunUploads = field(default_factory=RunUploads)
    opened_at: float = field(default_factory=perf_counter)
    """When the set-up of the run began."""
    first_step: int = 0
    """The step that this process began or resumed with."""
    group_rollouts: GroupRollouts | None = None
    """Of an asynchronous run: plays groups beside training."""

    def mark_resume_point(self) -> None:
        """An interruption keeps everything up to here; later work is repeated on resume."""
        self.resume_point.data = self.rollouts.sampler.state_dict()
        if self.group_rollouts is not None:
            self.resume_point.open_groups = self.group_rollouts.groups.state_dict(self.state.step)
        self.resume_point.metrics = self.log.pending
        self.resume_point.policy_version = self.learner.policy_version

    @property
    def is_within_update(self) -> bool:
        """The weights have changed since the last resume point: an update failed or is suspect."""
        version = self.learner.policy_version
        return self.learner.is_within_update or version != self.resume_point.policy_version

    def rewind(self) -> None:
        """Go back to the last resume point: tasks sampled since then are sampled again."""
        self.rollouts.sampler.load_state_dict(self.resume_point.data)
        if self.group_rollouts is not None:
            self.group_rollouts.groups.load_state_dict(self.resume_point.open_groups)
        self.state.pending_metrics = dict(self.resume_point.metrics)

    def check_locks(self) -> None:
        """Before the run writes: raise if another process has taken over one of them."""
        for lock in self.locks:
            lock.check()

    def save(self) -> Checkpoint:
        self.check_locks()
        # What a checkpoint follows must not be less durable than the checkpoint.
        self.log.sync()
        self.checker.sync()
        self.state.sent_alerts = self.alerts.list_sent()
        if self.group_rollouts is not None:
            self.state.open_groups = self.group_rollouts.groups.state_dict(self.state.step)
        # Step 0 is the policy before reinforcement learning, the default KL reference.
        protect = (0, self.state.best_step, self.state.reference_step)
        self.uploads.remove_uploaded(protect)  # before: a checkpoint may need the space
        saved = save_checkpoint(
            self.checkpoints,
            self.state.step,
            checkpoint_parts(self.state, self.learner, self.critic, self.rollouts.sampler),
            max_to_keep=self.schedule.max_ckpts_to_keep,
            protect=(*protect, *self.uploads.pending_steps),
        )
        self.journal.follow_checkpoint(saved.step)
        self.uploads.submit(saved)
        return saved

    async def close(self, error: BaseException | None = None) -> None:
        """`error` has ended the run."""
        if self.group_rollouts is not None:  # the loop may not have been closed by its caller
            await self.group_rollouts.close()
        # What trackers, alerts and spans still have to send, they send at the same time.
        self.log.finish(_describe_end(error))
        self.alerts.finish()
        if self.tracer is not None:
            self.tracer.finish()
        try:
            await asyncio.to_thread(self.log.close)
            await self.opened.aclose()
        finally:
            if self.tracer is not None:
                await asyncio.to_thread(self.tracer.close)
            await self.alerts.close()


def _describe_end(error: BaseException | None) -> RunState:
    """A step iterator that its user closes early ends the run as well as its last step does."""
    if error is None or isinstance(error, GeneratorExit):
        return "finished"
    return "failed" if isinstance(error, Exception) else "killed"


def checkpoint_parts(
    state: TrainerState, learner: Saveable, critic: Saveable | None, sampler: Stateful
) -> dict[str, Saveable]:
    return {
        # First, because it names the checkpoint that holds the KL reference.
        "trainer": JsonPart(state),
        "policy": learner,
        **({} if critic is None else {"critic": critic}),
        "data": JsonPart(sampler),
    }
