"""EvalReport: how good a policy was on one set of tasks, with the evidence task by task.

Every grouping splits all the tasks: weighted by its tasks, each recombines to the overall pass@1
and mean reward. pass@k does where every task has k graded attempts, for it is over those only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import TypeAdapter, ValidationError

from skyfleet.evaluation.baselines import Baseline
from skyfleet.evaluation.player import Player
from skyfleet.evaluation.score import PASS_THRESHOLD, EnvScore, TaskOutcome
from skyfleet.metrics.naming import key
from skyfleet.metrics.rewards import signal_metrics
from skyfleet.tasks.task import Task
from skyfleet.trajectories.records import RecordError
from skyfleet.trajectories.trajectory import Group

TRAINED, HELD_OUT = "trained", "held out"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport:
    name: str
    step: int
    overall: EnvScore
    by_env: Mapping[str, EnvScore]
    outcomes: Mapping[str, TaskOutcome]
    """By task key."""
    by_difficulty: Mapping[str, EnvScore] = field(default_factory=dict)
    """1 easy, 2 medium, 3 hard, unstated; empty where no task says how difficult it is."""
    by_exposure: Mapping[str, EnvScore] = field(default_factory=dict)
    """Environments trained on and held out; empty where nobody said which are."""
    baselines: Mapping[str, Baseline] = field(default_factory=dict)
    """By environment; empty where they were not measured."""
    pass_threshold: float = PASS_THRESHOLD
    played_by: Player | None = None
    """None where nobody said, as in older reports."""

    @classmethod
    def of(
        cls,
        name: str,
        groups: Sequence[Group],
        *,
        step: int,
        tasks: Sequence[Task] = (),
        trained_envs: Collection[str] | None = None,
        baselines: Mapping[str, Baseline] | None = None,
        pass_threshold: float = PASS_THRESHOLD,
        played_by: Player | None = None,
    ) -> EvalReport:
        """What the groups say; groups of the same task are one task.

        `tasks` say how difficult each is, `trained_envs` which environments a policy has seen.
        """
        difficulties = {task.key: task.difficulty for task in tasks}
        by_task: dict[str, list[Group]] = defaultdict(list)
        for group in groups:
            by_task[group.task_key].append(group)
        outcomes = {
            task_key: TaskOutcome.of(
                same, pass_threshold=pass_threshold, difficulty=difficulties.get(task_key)
            )
            for task_key, same in sorted(by_task.items())
        }
        everything = list(outcomes.values())
        stated = any(outcome.difficulty is not None for outcome in everything)
        return cls(
            name=name,
            step=step,
            overall=EnvScore.of(everything),
            by_env=_scores(everything, lambda outcome: outcome.env_key),
            outcomes=outcomes,
            by_difficulty=_scores(everything, lambda o: o.difficulty_name) if stated else {},
            by_exposure=_scores(
                everything, lambda o: TRAINED if o.env_key in trained_envs else HELD_OUT
            )
            if trained_envs is not None
            else {},
            baselines=baselines or {},
            pass_threshold=pass_threshold,
            played_by=played_by,
        )

    def metrics(self, prefix: str = "eval") -> dict[str, float]:
        """`{prefix}/{env}/avg_score` and so on, and the same under `{prefix}/all`."""
        everything = list(self.outcomes.values())
        metrics = _scope_metrics(prefix, "all", self.overall, everything)
        for env_key, outcomes in _split(everything, lambda outcome: outcome.env_key).items():
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


def _split(
    outcomes: Sequence[TaskOutcome], part: Callable[[TaskOutcome], str]
) -> dict[str, list[TaskOutcome]]:
    parts: dict[str, list[TaskOutcome]] = defaultdict(list)
    for outcome in outcomes:
        parts[part(outcome)].append(outcome)
    return dict(sorted(parts.items()))


def _scores(
    outcomes: Sequence[TaskOutcome], part: Callable[[TaskOutcome], str]
) -> dict[str, EnvScore]:
    return {name: EnvScore.of(of_part) for name, of_part in _split(outcomes, part).items()}


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
