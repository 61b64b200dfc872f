"""EvalReport: how good a policy was on one set of tasks, with the evidence task by task.

Every grouping splits all the tasks: weighted by its tasks, each recombines to the overall pass@1
and mean reward. pass@k does where every task has k graded attempts, for it is over those only.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from skyfleet.config.explain import as_yaml
from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError
from skyfleet.evaluation.agent_info import AgentInfo, differences
from skyfleet.evaluation.baselines import Baseline
from skyfleet.evaluation.score import PASS_THRESHOLD, EnvScore, TaskOutcome
from skyfleet.metrics.rollout_metrics import key, signal_metrics
from skyfleet.storage.local import write_atomically
from skyfleet.tasks.task import Task
from skyfleet.trajectories.archive import EpisodeWriter, eval_path, write_groups
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
    played_by: AgentInfo | None = None
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
        played_by: AgentInfo | None = None,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    pairs: tuple[tuple[EvalReport, EvalReport], ...]
    """Before and after, set by set."""
    unmatched: tuple[str, ...]
    """Sets that only one side has."""


def match_reports(before: Path, after: Path | None, *, step: int | None = None) -> Matched:
    """A run folder alone is its first step against its last, or against `step`.

    Of two, each path is a report, a folder of reports, or a run folder: its last step, or `step`.
    """
    if step is not None and after is not None and not (_steps(before) or _steps(after)):
        raise ConfigError(
            f"--step {step} is of a run folder, and neither {before} nor {after} is one"
        )
    if after is None:
        first, last = _first_and_later(before, step)
        one, other = _of_folder(first), _of_folder(last)
    else:
        one, other = read_reports(before, step=step), read_reports(after, step=step)
    if after is not None and before.is_file() and after.is_file():
        return Matched(pairs=tuple(zip(one.values(), other.values(), strict=True)), unmatched=())
    common = sorted(one.keys() & other.keys())
    if not common:
        raise ConfigError(
            f"{before} has {sorted(one)} and {after or before} has {sorted(other)}: no set in "
            "common; name two report files to compare sets of different names"
        )
    return Matched(
        pairs=tuple((one[name], other[name]) for name in common),
        unmatched=tuple(sorted(one.keys() ^ other.keys())),
    )


def read_reports(path: Path, *, step: int | None = None) -> dict[str, EvalReport]:
    """By set: of a report, of a folder of them, or of a run's last step, or `step`."""
    if path.is_file():
        return _read([path])
    if steps := _steps(path):
        return _of_folder(steps[max(steps) if step is None else _known(path, step, steps)])
    return _of_folder(path)


def _first_and_later(run: Path, step: int | None) -> tuple[Path, Path]:
    steps = _steps(run)
    if len(steps) < 2:
        raise ConfigError(
            f"{run} has reports of {len(steps)} steps, and a comparison needs two; name a run "
            "folder that was evaluated twice, or two reports"
        )
    later = max(steps) if step is None else _known(run, step, steps)
    return steps[min(steps)], steps[later]


def _steps(run: Path) -> dict[int, Path]:
    """`reports/step_000060` and the like of a run folder."""
    folders = ((p.name.removeprefix("step_"), p) for p in run.glob("reports/step_*") if p.is_dir())
    return {int(number): folder for number, folder in folders if number.isdecimal()}


def _known(run: Path, step: int, steps: dict[int, Path]) -> int:
    if step not in steps:
        raise ConfigError(f"--step {step}: {run} was evaluated at {sorted(steps)}; choose of these")
    return step


def _of_folder(folder: Path) -> dict[str, EvalReport]:
    reports = _read(sorted(folder.glob("*.json")))
    if not reports:
        raise ConfigError(
            f"{folder} holds no report; name a report, a folder of reports or a run folder"
        )
    return reports


def _read(paths: Iterable[Path]) -> dict[str, EvalReport]:
    reports = {}
    for path in paths:
        try:
            report = EvalReport.from_json(path.read_text(encoding="utf-8"))
        except (RecordError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is no report: {error}") from None
        reports[report.name] = report
    return reports


def check_output(output: Path) -> None:
    """Before any work, and without a trace: what could not be kept at the end is refused now."""
    if (output / "metrics.jsonl").exists():
        raise ConfigError(f"--output {output} holds a training run; name another folder")
    whole = output.absolute()
    there = next(path for path in (whole, *whole.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        problem = "cannot be written" if there.is_dir() else "is a file"
        raise ConfigError(
            f"--output {output}: {there} {problem}; name a folder that can be written"
        )


def prepare_output(output: Path, config: RunConfig, player: AgentInfo) -> None:
    """A folder is one player's: what reads a run would take two for one that changed."""
    check_output(output)
    for path in sorted(output.glob("reports/step_*/*.json")):
        other = EvalReport.from_json(path.read_text()).played_by
        if other is not None and (apart := differences(other, player)):
            raise ConfigError(
                f"--output {output} holds what another played ({'; '.join(apart)}); "
                "name another folder"
            )
    try:
        output.mkdir(parents=True, exist_ok=True)
        write_atomically(output / "config.yaml", as_yaml(config))
    except OSError as error:
        raise ConfigError(
            f"--output {output}: {error.strerror}; name a folder that can be written"
        ) from None


def open_episodes(output: Path, name: str, step: int) -> EpisodeWriter:
    """Keeps episodes as they end. An older report tells of others, and goes first."""
    _path(output, name, step).unlink(missing_ok=True)
    return EpisodeWriter(eval_path(output / "trajectories", name, step))


def keep_evaluation(output: Path, report: EvalReport, groups: Sequence[Group]) -> None:
    """The report and its episodes, so that whatever reads a run reads these."""
    write_groups(eval_path(output / "trajectories", report.name, report.step), groups)
    save_report(output, report)


def save_report(folder: Path, report: EvalReport) -> None:
    path = _path(folder, report.name, report.step)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, report.to_json())


def load_report(folder: Path, name: str, step: int) -> EvalReport | None:
    path = _path(folder, name, step)
    return EvalReport.from_json(path.read_text()) if path.exists() else None


def _path(folder: Path, name: str, step: int) -> Path:
    return folder / "reports" / f"step_{step:06d}" / f"{name}.json"
