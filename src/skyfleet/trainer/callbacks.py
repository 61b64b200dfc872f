"""Callbacks: user functions called on every episode, training step and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from skyfleet.evaluation.report import EvalReport
from skyfleet.trajectories.trajectory import Group, Trajectory


class Signal(Enum):
    STOP = "stop"
    """Returned by a callback: finish the current step, evaluate, save and end the run."""


STOP = Signal.STOP


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One training step: its groups and the metrics logged for it."""

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
            error.add_note(f"raised by {place}")
            raise
        if returned is STOP:
            self.stop_requested = True
