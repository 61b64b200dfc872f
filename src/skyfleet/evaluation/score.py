"""Scores: success rate, mean reward, pass@k and pass^k of the attempts at a set of tasks.

A rate or mean is over tasks: the attempts at a task are averaged first, so every task has the same
weight however often it was attempted. Ungraded attempts are counted and otherwise left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from skyfleet.metrics.intervals import mean_rate, pass_at_k, pass_hat_k, wilson
from skyfleet.tasks.task import Grade
from skyfleet.trajectories.trajectory import Group

PASS_THRESHOLD = 1.0
"""The default pass threshold, at which the verifier's `success` decides and not the reward."""

_DIFFICULTIES = {None: "unstated", 1: "1 easy", 2: "2 medium", 3: "3 hard"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOutcome:
    env_key: str
    successes: int
    rewards: tuple[float, ...]
    """One per graded attempt."""
    unknown: int = 0
    """The number of ungraded attempts."""
    difficulty: int | None = None
    content_hash: str | None = None
    """Of the task, see `hash_content`; None in reports of older versions."""

    @classmethod
    def from_groups(
        cls,
        groups: Sequence[Group],
        *,
        pass_threshold: float,
        difficulty: int | None,
        content_hash: str | None = None,
    ) -> TaskOutcome:
        """All groups must have the same task key."""
        attempts = [attempt for group in groups for attempt in group.trajectories]
        grades = [attempt.grade for attempt in attempts if attempt.grade is not None]
        return cls(
            env_key=groups[0].env_key,
            successes=sum(passes(grade, pass_threshold) for grade in grades),
            rewards=tuple(grade.reward for grade in grades),
            unknown=len(attempts) - len(grades),
            difficulty=difficulty,
            content_hash=content_hash,
        )

    @property
    def attempts(self) -> int:
        return len(self.rewards)

    @property
    def success_rate(self) -> float:
        """Only defined if there is a graded attempt."""
        return self.successes / self.attempts

    def is_same_task(self, other: TaskOutcome) -> bool:
        """Whether the task had the same content, as far as both reports say."""
        return None in (self.content_hash, other.content_hash) or (
            self.content_hash == other.content_hash
        )

    @property
    def difficulty_name(self) -> str:
        return _DIFFICULTIES.get(self.difficulty, str(self.difficulty))


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvScore:
    n_tasks: int
    """Tasks with at least one graded attempt; the other numbers are over these."""
    n_attempts: int
    n_unknown: int
    success_rate: float | None
    """None if nothing was graded, like the mean reward."""
    mean_reward: float | None
    pass_at_k: Mapping[int, float]
    """Over the tasks with at least k graded attempts."""
    pass_hat_k: Mapping[int, float]
    interval: tuple[float, float]
    """95 % interval of the success rate: Wilson's for single attempts, otherwise `mean_rate`."""

    @classmethod
    def from_outcomes(cls, outcomes: Sequence[TaskOutcome]) -> EnvScore:
        graded = [outcome for outcome in outcomes if outcome.rewards]
        rates = [outcome.success_rate for outcome in graded]
        rate = fmean(rates) if rates else None
        max_attempts = max((outcome.attempts for outcome in graded), default=0)
        tasks_by_k = {k: [o for o in graded if o.attempts >= k] for k in _ks(max_attempts)}
        return cls(
            n_tasks=len(graded),
            n_attempts=sum(outcome.attempts for outcome in graded),
            n_unknown=sum(outcome.unknown for outcome in outcomes),
            success_rate=rate,
            mean_reward=fmean(fmean(o.rewards) for o in graded) if graded else None,
            pass_at_k={
                k: fmean(pass_at_k(o.attempts, o.successes, k) for o in tasks)
                for k, tasks in tasks_by_k.items()
            },
            pass_hat_k={
                k: fmean(pass_hat_k(o.attempts, o.successes, k) for o in tasks)
                for k, tasks in tasks_by_k.items()
            },
            interval=mean_rate(rates) if max_attempts > 1 else wilson(rate or 0.0, len(rates)),
        )


def passes(grade: Grade, pass_threshold: float) -> bool:
    """Whether a grade counts as a pass; every pass rate uses this function."""
    return grade.success if pass_threshold == PASS_THRESHOLD else grade.reward >= pass_threshold


def _ks(max_attempts: int) -> list[int]:
    """The powers of two up to `max_attempts`, and itself: `_ks(3)` is [1, 2, 3]."""
    if not max_attempts:
        return []
    return sorted({2**power for power in range(max_attempts.bit_length())} | {max_attempts})
