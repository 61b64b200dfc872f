"""EvalReport: how good a policy was on one set of tasks, with the evidence task by task.

A rate or a mean is taken over tasks, each task's attempts averaged first, so a task counts once
however often it was attempted. Attempts of unknown grade are counted and otherwise left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from pydantic import TypeAdapter, ValidationError

from skyfleet.metrics.intervals import cluster_bootstrap, wilson
from skyfleet.metrics.naming import key
from skyfleet.metrics.pass_at_k import pass_at_k, pass_hat_k
from skyfleet.metrics.rewards import signal_metrics
from skyfleet.trajectories.records import RecordError
from skyfleet.trajectories.trajectory import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOutcome:
    env_key: str
    successes: int
    rewards: tuple[float, ...]
    """One per graded attempt."""
    unknown: int = 0
    """Attempts that could not be graded."""

    @property
    def attempts(self) -> int:
        return len(self.rewards)

    @property
    def success_rate(self) -> float:
        """Ask only where there is a graded attempt."""
        return self.successes / self.attempts


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvScore:
    n_tasks: int
    """Tasks with a graded attempt; the other numbers are over these."""
    n_attempts: int
    n_unknown: int
    success_rate: float | None
    """None, like the mean reward: nothing was graded."""
    mean_reward: float | None
    pass_at_k: Mapping[int, float]
    """Over the tasks with at least k graded attempts."""
    pass_hat_k: Mapping[int, float]
    interval: tuple[float, float]
    """95 % of the success rate: Wilson for single attempts, otherwise resampling tasks."""

    @classmethod
    def of(cls, outcomes: Sequence[TaskOutcome]) -> EnvScore:
        graded = [outcome for outcome in outcomes if outcome.rewards]
        rates = [outcome.success_rate for outcome in graded]
        rate = fmean(rates) if rates else None
        most = max((outcome.attempts for outcome in graded), default=0)
        tried = {k: [o for o in graded if o.attempts >= k] for k in _ks(most)}
        return cls(
            n_tasks=len(graded),
            n_attempts=sum(outcome.attempts for outcome in graded),
            n_unknown=sum(outcome.unknown for outcome in outcomes),
            success_rate=rate,
            mean_reward=fmean(fmean(o.rewards) for o in graded) if graded else None,
            pass_at_k={
                k: fmean(pass_at_k(o.attempts, o.successes, k) for o in tasks)
                for k, tasks in tried.items()
            },
            pass_hat_k={
                k: fmean(pass_hat_k(o.attempts, o.successes, k) for o in tasks)
                for k, tasks in tried.items()
            },
            interval=cluster_bootstrap(rates) if most > 1 else wilson(rate or 0.0, len(rates)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport:
    name: str
    step: int
    overall: EnvScore
    by_env: Mapping[str, EnvScore]
    outcomes: Mapping[str, TaskOutcome]
    """By task key."""

    @classmethod
    def of(cls, name: str, groups: Sequence[Group], *, step: int) -> EvalReport:
        """What the groups say; groups of the same task are one task."""
        by_task: dict[str, list[Group]] = defaultdict(list)
        for group in groups:
            by_task[group.task_key].append(group)
        outcomes = {task_key: _outcome(same) for task_key, same in sorted(by_task.items())}
        return cls(
            name=name,
            step=step,
            overall=EnvScore.of(list(outcomes.values())),
            by_env={env_key: EnvScore.of(o) for env_key, o in _by_env(outcomes).items()},
            outcomes=outcomes,
        )

    def metrics(self, prefix: str = "eval") -> dict[str, float]:
        """`{prefix}/{env}/avg_score` and so on, and the same under `{prefix}/all`."""
        everything = list(self.outcomes.values())
        metrics = _scope_metrics(prefix, "all", self.overall, everything)
        for env_key, outcomes in _by_env(self.outcomes).items():
            metrics |= _scope_metrics(prefix, env_key, self.by_env[env_key], outcomes)
        return metrics

    def to_json(self) -> str:
        return _REPORT.dump_json(self, indent=2).decode()

    @classmethod
    def from_json(cls, text: str) -> EvalReport:
        try:
            return _REPORT.validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "report"
            raise RecordError(f"{where}: {first['msg']}; give what to_json wrote") from None


_REPORT = TypeAdapter(EvalReport)


def _ks(most: int) -> list[int]:
    """1, 2, 4, … and `most` itself: `_ks(3)` is [1, 2, 3]."""
    return sorted({2**power for power in range(most.bit_length())} | {most}) if most else []


def _outcome(groups: Sequence[Group]) -> TaskOutcome:
    graded = [attempt for group in groups for attempt in group.graded]
    attempts = sum(len(group.trajectories) for group in groups)
    return TaskOutcome(
        env_key=groups[0].env_key,
        successes=sum(attempt.success is True for attempt in graded),
        rewards=tuple(reward for group in groups for reward in group.rewards),
        unknown=attempts - len(graded),
    )


def _by_env(outcomes: Mapping[str, TaskOutcome]) -> dict[str, list[TaskOutcome]]:
    by_env: dict[str, list[TaskOutcome]] = defaultdict(list)
    for outcome in outcomes.values():
        by_env[outcome.env_key].append(outcome)
    return dict(sorted(by_env.items()))


def _scope_metrics(
    prefix: str, scope: str, score: EnvScore, outcomes: Sequence[TaskOutcome]
) -> dict[str, float]:
    values = {"unknown_grades": float(score.n_unknown)}
    if score.mean_reward is not None:
        low, high = score.interval
        values |= {"avg_score": score.mean_reward, "pass_at_1_low": low, "pass_at_1_high": high}
        values |= {f"pass_at_{k}": value for k, value in score.pass_at_k.items()}
        values |= {f"pass_hat_{k}": value for k, value in score.pass_hat_k.items() if k > 1}
        values |= signal_metrics([outcome.rewards for outcome in outcomes])
    return {key(prefix, scope, name): value for name, value in values.items()}
