"""Callbacks: user functions called on every episode, training step and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from skyfleet.evaluation.report import EvalReport
from skyfleet.terminal import add_note
from skyfleet.trajectories.trajectory import Group, Trajectory


class Signal(Enum):
    """What a callback can return. After `sf.STOP` the run finishes the step, evaluates, saves and ends.

    >>> import skyfleet as sf
    >>> def stop_when_solved(step):
    ...     if step.reward is not None and step.reward > 0.9:
    ...         return sf.STOP
    >>> tasks = [{"prompt": f"Write the number {n}."} for n in range(4)]
    >>> result = sf.train("tiny", reward=lambda answer: 1.0, tasks=tasks, eval=False, steps=3,
    ...                   batch_size=2, algorithm=sf.GRPO(group_size=2, kl=0),
    ...                   sampling=sf.Sampling(max_tokens=4), on_step=stop_when_solved)
    >>> result.step
    1
    """

    STOP = "stop"


STOP = Signal.STOP


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One training step: its groups and the metrics logged for it.

    >>> import skyfleet as sf
    >>> def on_step(step: sf.StepResult) -> None:
    ...     print(step.number, step.reward)
    >>> on_step(sf.StepResult(number=1, groups=[], metrics={}))
    1 None
    """

    number: int
    groups: Sequence[Group] = field(repr=False)
    metrics: dict[str, float] = field(repr=False)

    @property
    def reward(self) -> float | None:
        """Mean reward over the graded attempts; None if no attempt has a grade."""
        rewards = [t.reward for group in self.groups for t in group.graded if t.reward is not None]
        return sum(rewards) / len(rewards) if rewards else None


@dataclass(slots=True, kw_only=True)
class Callbacks:
    on_episode: Callable[[Trajectory], Any] | None = None
    on_step: Callable[[StepResult], Any] | None = None
    on_evaluation: Callable[[EvalReport], Any] | None = None
    stop_requested: bool = False

    def episode(self, trajectory: Trajectory) -> None:
        if self.on_episode is not None:
            self._call(self.on_episode, trajectory, f"on_episode on task {trajectory.task_key}")

    def step(self, result: StepResult) -> None:
        if self.on_step is not None:
            self._call(self.on_step, result, f"on_step on step {result.number}")

    def evaluation(self, report: EvalReport) -> None:
        if self.on_evaluation is not None:
            place = f"on_evaluation on set {report.name} at step {report.step}"
            self._call(self.on_evaluation, report, place)

    def _call(self, callback: Callable[[Any], Any], value: object, place: str) -> None:
        try:
            returned = callback(value)
        except Exception as error:
            add_note(error, f"raised by {place}")
            raise
        if returned is STOP:
            self.stop_requested = True
