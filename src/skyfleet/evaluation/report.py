"""EvalReport: the scores of one evaluation set at one step, with the outcome of every task.

Each grouping (environment, difficulty, exposure) partitions the tasks: its success rates and mean
rewards, weighted by tasks, combine to the overall ones. pass@k does so only if every task has k
graded attempts, because it is over the tasks that have them.
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from skyfleet.config.keys import dump_yaml
from skyfleet.config.root import RunConfig
from skyfleet.envs.grading_code import GradingCode
from skyfleet.errors import ConfigError
from skyfleet.evaluation.agent_info import AgentInfo, differences
from skyfleet.evaluation.baselines import Baseline, find_declared_baselines
from skyfleet.evaluation.score import PASS_THRESHOLD, EnvScore, TaskOutcome
from skyfleet.metrics.rollout_metrics import metric_key, signal_metrics
from skyfleet.storage.local import make_folder, write_atomically
from skyfleet.tasks.content_hash import hash_content
from skyfleet.tasks.task import Task
from skyfleet.trajectories.archive import EpisodeWriter, eval_path, write_groups
from skyfleet.trajectories.records import RecordError
from skyfleet.trajectories.trajectory import Group

TRAINED, HELD_OUT = "trained", "held out"
MAIN_PREFIX = "eval"
"""The metric prefix of the main evaluation set."""
RETAIL_SET = "retail_val"
"""The name that the set of `data.retail_val_data` has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport:
    name: str
    step: int
    overall: EnvScore
    by_env: Mapping[str, EnvScore]
    outcomes: Mapping[str, TaskOutcome]
    """By task key."""
    by_difficulty: Mapping[str, EnvScore] = field(default_factory=dict)
    """Keys `1 easy`, `2 medium`, `3 hard`, `unstated`; empty if no task states its difficulty."""
    by_exposure: Mapping[str, EnvScore] = field(default_factory=dict)
    """Trained and held-out environments; empty if the trained ones are not known."""
    baselines: Mapping[str, Baseline] = field(default_factory=dict)
    """By environment; empty if they were neither measured nor declared by the tasks."""
    pass_threshold: float = PASS_THRESHOLD
    # The alias keeps the key of reports on disk, whatever the attribute is called.
    agent_info: Annotated[AgentInfo | None, Field(alias="played_by")] = None
    """None in reports of older versions."""
    grading_code: GradingCode | None = None
    """The user's code that played and graded; None in reports of older versions."""
    trained_envs: tuple[str, ...] | None = None
    """The environments that the policy trained on; None if not known, as in older versions."""

    @classmethod
    def from_groups(
        cls,
        name: str,
        groups: Sequence[Group],
        *,
        step: int,
        tasks: Sequence[Task] = (),
        trained_envs: Collection[str] | None = None,
        baselines: Mapping[str, Baseline] | None = None,
        pass_threshold: float = PASS_THRESHOLD,
        agent_info: AgentInfo | None = None,
        grading_code: GradingCode | None = None,
    ) -> EvalReport:
        """Score the groups; groups with the same task key count as one task.

        `tasks` provide difficulties and content hashes, `trained_envs` the environments the policy trained on.
        """
        by_key = {task.key: task for task in tasks}
        by_task: dict[str, list[Group]] = defaultdict(list)
        for group in groups:
            by_task[group.task_key].append(group)
        outcomes = {
            task_key: TaskOutcome.from_groups(
                task_groups,
                pass_threshold=pass_threshold,
                difficulty=by_key[task_key].difficulty if task_key in by_key else None,
                content_hash=hash_content(by_key[task_key]) if task_key in by_key else None,
            )
            for task_key, task_groups in sorted(by_task.items())
        }
        everything = list(outcomes.values())
        any_difficulty = any(outcome.difficulty is not None for outcome in everything)
        return cls(
            name=name,
            step=step,
            overall=EnvScore.from_outcomes(everything),
            by_env=_score_parts(everything, lambda outcome: outcome.env_key),
            outcomes=outcomes,
            by_difficulty=_score_parts(everything, lambda o: o.difficulty_name)
            if any_difficulty
            else {},
            by_exposure=_score_parts(
                everything, lambda o: TRAINED if o.env_key in trained_envs else HELD_OUT
            )
            if trained_envs is not None
            else {},
            baselines=baselines
            or find_declared_baselines([by_key[k] for k in by_task if k in by_key]),
            pass_threshold=pass_threshold,
            agent_info=agent_info,
            grading_code=grading_code,
            trained_envs=None if trained_envs is None else tuple(sorted(trained_envs)),
        )

    def metrics(self, prefix: str = MAIN_PREFIX) -> dict[str, float]:
        """The report as metrics; `metric_prefix` says which prefix a set has.

        The main set has SkyRL's names: `eval/all/avg_score`, `eval/{env}/pass_at_4` and so on. For
        any other set the overall numbers are `{prefix}/average_reward`, `{prefix}/success_rate` and
        so on, and those of an environment are named as in the main set.
        """
        everything = list(self.outcomes.values())
        overall = _score_metrics(self.overall, everything)
        if prefix == MAIN_PREFIX:
            metrics = {metric_key(prefix, "all", name): value for name, value in overall.items()}
        else:
            metrics = {
                metric_key(prefix, _NAMED_SET_METRICS.get(name, name)): value
                for name, value in overall.items()
            }
        for env_key, outcomes in _partition(everything, lambda outcome: outcome.env_key).items():
            for name, value in _score_metrics(self.by_env[env_key], outcomes).items():
                metrics[metric_key(prefix, env_key, name)] = value
        return metrics

    def find_changed_code(self, other: EvalReport) -> list[str]:
        """Names in the code that played and graded which differ, as far as both reports say."""
        if self.grading_code is None or other.grading_code is None:
            return []
        return self.grading_code.find_changes(other.grading_code)

    def to_json(self) -> str:
        return _ADAPTER.dump_json(self, indent=2, by_alias=True).decode()

    @classmethod
    def from_json(cls, text: str) -> EvalReport:
        try:
            return _ADAPTER.validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "report"
            raise RecordError(
                f"{where}: {first['msg']}; pass a report that `to_json` wrote"
            ) from None


_ADAPTER = TypeAdapter(EvalReport)

_NAMED_SET_METRICS = {
    "avg_score": "average_reward",
    "pass_at_1": "success_rate",
    "pass_at_1_low": "success_rate_low",
    "pass_at_1_high": "success_rate_high",
}
"""The overall numbers of a named set that have another name than those of the main set."""


def metric_prefix(name: str, *, is_main: bool) -> str:
    """`eval` for the main set, whatever its name; `eval-retail` and `test-{name}` for others."""
    if is_main:
        return MAIN_PREFIX
    return "eval-retail" if name == RETAIL_SET else f"test-{name}"


def _partition(
    outcomes: Sequence[TaskOutcome], part: Callable[[TaskOutcome], str]
) -> dict[str, list[TaskOutcome]]:
    parts: dict[str, list[TaskOutcome]] = defaultdict(list)
    for outcome in outcomes:
        parts[part(outcome)].append(outcome)
    return dict(sorted(parts.items()))


def _score_parts(
    outcomes: Sequence[TaskOutcome], part: Callable[[TaskOutcome], str]
) -> dict[str, EnvScore]:
    parts = _partition(outcomes, part)
    return {name: EnvScore.from_outcomes(members) for name, members in parts.items()}


def _score_metrics(score: EnvScore, outcomes: Sequence[TaskOutcome]) -> dict[str, float]:
    metrics = {"unknown_grades": float(score.n_unknown)}
    if score.mean_reward is None:
        return metrics
    low, high = score.interval
    metrics |= {"avg_score": score.mean_reward, "pass_at_1_low": low, "pass_at_1_high": high}
    metrics |= {f"pass_at_{k}": value for k, value in score.pass_at_k.items()}
    metrics |= {f"pass_hat_{k}": value for k, value in score.pass_hat_k.items() if k > 1}
    return metrics | signal_metrics([outcome.rewards for outcome in outcomes])


def save_report(folder: Path, report: EvalReport) -> None:
    path = _report_path(folder, report.name, report.step)
    make_folder(path.parent)
    write_atomically(path, report.to_json())


def load_report(folder: Path, name: str, step: int) -> EvalReport | None:
    path = _report_path(folder, name, step)
    return EvalReport.from_json(path.read_text()) if path.exists() else None


def remove_reports_after(folder: Path, last_step: int) -> None:
    """Remove the reports of later steps, which a resumed run writes again."""
    for step, reports in _step_folders(folder).items():
        if step > last_step:
            shutil.rmtree(reports)


def save_evaluation(folder: Path, report: EvalReport, groups: Sequence[Group]) -> None:
    """Write the report and its episodes where a training run writes them."""
    write_groups(eval_path(folder / "trajectories", report.name, report.step), groups)
    save_report(folder, report)


def _report_path(folder: Path, name: str, step: int) -> Path:
    return folder / "reports" / f"step_{step:06d}" / f"{name}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedReports:
    pairs: tuple[tuple[EvalReport, EvalReport], ...]
    """Before and after, one pair per set."""
    unmatched: tuple[str, ...]
    """Sets that only one side has."""


def match_reports(before: Path, after: Path | None, *, step: int | None = None) -> MatchedReports:
    """Pair the reports to compare, set by set.

    A single run folder: its first step with its last, or with `step`. Otherwise each path is a
    report, a folder of reports, or a run folder, which stands for its last step, or for `step`.
    """
    if (
        step is not None
        and after is not None
        and not (_step_folders(before) or _step_folders(after))
    ):
        raise ConfigError(
            f"step {step} needs a run folder, and neither {before} nor {after} is one"
        )
    if after is None:
        first, last = _first_and_later(before, step)
        one, other = _read_folder(first), _read_folder(last)
    else:
        one, other = read_reports(before, step=step), read_reports(after, step=step)
    if after is not None and before.is_file() and after.is_file():
        pairs = tuple(zip(one.values(), other.values(), strict=True))
        return MatchedReports(pairs=pairs, unmatched=())
    common = sorted(one.keys() & other.keys())
    if not common:
        raise ConfigError(
            f"{before} has {sorted(one)} and {after or before} has {sorted(other)}: no set in "
            "common; name two report files to compare sets of different names"
        )
    return MatchedReports(
        pairs=tuple((one[name], other[name]) for name in common),
        unmatched=tuple(sorted(one.keys() ^ other.keys())),
    )


def read_reports(path: Path, *, step: int | None = None) -> dict[str, EvalReport]:
    """By set: a report file, a folder of them, or the last step of a run, or `step`."""
    if path.is_file():
        return _read_files([path])
    if steps := _step_folders(path):
        return _read_folder(steps[max(steps) if step is None else _check_step(path, step, steps)])
    return _read_folder(path)


def _first_and_later(run: Path, step: int | None) -> tuple[Path, Path]:
    steps = _step_folders(run)
    if len(steps) < 2:
        raise ConfigError(
            f"{run} has reports of {len(steps)} steps, and a comparison needs two; name a run "
            "folder that was evaluated twice, or two reports"
        )
    later = max(steps) if step is None else _check_step(run, step, steps)
    return steps[min(steps)], steps[later]


def _step_folders(run: Path) -> dict[int, Path]:
    """`reports/step_000060` and so on, by step."""
    folders = ((p.name.removeprefix("step_"), p) for p in run.glob("reports/step_*") if p.is_dir())
    return {int(number): folder for number, folder in folders if number.isdecimal()}


def _check_step(run: Path, step: int, steps: Mapping[int, Path]) -> int:
    if step not in steps:
        raise ConfigError(
            f"--step {step}: {run} was evaluated at {sorted(steps)}; choose one of these"
        )
    return step


def _read_folder(folder: Path) -> dict[str, EvalReport]:
    reports = _read_files(sorted(folder.glob("*.json")))
    if not reports:
        raise ConfigError(
            f"{folder} holds no report; name a report, a folder of reports or a run folder"
        )
    return reports


def _read_files(paths: Iterable[Path]) -> dict[str, EvalReport]:
    reports = {}
    for path in paths:
        try:
            report = EvalReport.from_json(path.read_text(encoding="utf-8"))
        except (RecordError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not a report: {error}") from None
        reports[report.name] = report
    return reports


def check_output(output: Path) -> None:
    """Raise before any work if the results could not be written; creates nothing."""
    if (output / "metrics.jsonl").exists():
        raise ConfigError(f"--output {output} holds a training run; name another folder")
    absolute = output.absolute()
    existing = next(path for path in (absolute, *absolute.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        problem = "is not writable" if existing.is_dir() else "is a file"
        raise ConfigError(f"--output {output}: {existing} {problem}; name a writable folder")


def prepare_output(output: Path, config: RunConfig, agent: AgentInfo) -> None:
    """Create the folder and write the configuration.

    A folder holds the results of one agent, because the tools that read it compare its steps.
    """
    check_output(output)
    for path in sorted(output.glob("reports/step_*/*.json")):
        other = EvalReport.from_json(path.read_text()).agent_info
        if other is not None and (different := differences(other, agent)):
            raise ConfigError(
                f"--output {output} holds results of another agent ({'; '.join(different)}); "
                "name another folder"
            )
    try:
        output.mkdir(parents=True, exist_ok=True)
        write_atomically(output / "config.yaml", dump_yaml(config))
    except OSError as error:
        raise ConfigError(f"--output {output}: {error.strerror}; name a writable folder") from None


def open_episodes(output: Path, name: str, step: int) -> EpisodeWriter:
    """Write episodes as they finish; removes the old report, whose episodes are overwritten."""
    _report_path(output, name, step).unlink(missing_ok=True)
    return EpisodeWriter(eval_path(output / "trajectories", name, step))
