"""Scores and comparisons of settings that were trained with several seeds, paired by task and seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from skyfleet.errors import TaskError
from skyfleet.evaluation.compare import Change, check_same_code, compare
from skyfleet.evaluation.report import EvalReport
from skyfleet.evaluation.score import EnvScore, TaskOutcome
from skyfleet.metrics.intervals import Interval
from skyfleet.metrics.tasks_and_seeds import crossed_mean

Reports = Mapping[int, EvalReport]
"""The reports of one setting and one evaluation set, by seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedScore:
    """The success rate of a setting: the mean over tasks and seeds."""

    n_tasks: int
    """Tasks that are graded for every seed; only these count."""
    n_left_out: int
    rate: float
    interval: Interval
    """95 %, for other tasks and, if there are several seeds, for other seeds."""
    rate_by_seed: Mapping[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedChange:
    """A setting against the baseline."""

    change: Change
    """p, interval and detectable difference count the variation between tasks and between seeds."""
    seeds: tuple[int, ...]
    """The seeds that both have."""
    difference_by_seed: Mapping[int, float]


def score_over_seeds(reports: Reports) -> SeedScore:
    """Raise TaskError if no task is graded for every seed."""
    keys = _find_common_tasks([reports])
    table = [[report.outcomes[key].success_rate for report in reports.values()] for key in keys]
    # Not weighted by attempts: a seed with more graded attempts at a task does not count more.
    rate = fmean(fmean(row) for row in table)
    interval = EnvScore.from_outcomes([_merge(key, reports) for key in keys]).interval
    if _is_crossed(table):
        interval = _widen(interval, crossed_mean(table).interval(), lowest=0.0)
    return SeedScore(
        n_tasks=len(keys),
        n_left_out=_count_tasks([reports]) - len(keys),
        rate=rate,
        interval=(min(interval[0], rate), max(interval[1], rate)),
        rate_by_seed={
            seed: fmean(row[column] for row in table) for column, seed in enumerate(reports)
        },
    )


def compare_over_seeds(before: Reports, after: Reports) -> SeedChange:
    """Pair by task and seed; raise TaskError if nothing is graded on both sides.

    The p-value is the larger of two, and the interval the wider one: of the test over tasks, in which a
    seed is like a further attempt, and of the test over tasks and seeds.
    """
    seeds = tuple(seed for seed in before if seed in after)
    if not seeds:
        raise TaskError("no seed has finished on both sides; run the command again")
    before, after = ({seed: side[seed] for seed in seeds} for side in (before, after))
    keys = _find_common_tasks([before, after])
    change = compare(_merge_reports(keys, before), _merge_reports(keys, after)).overall
    table = [
        [
            after[seed].outcomes[key].success_rate - before[seed].outcomes[key].success_rate
            for seed in seeds
        ]
        for key in keys
    ]
    if _is_crossed(table):
        crossed = crossed_mean(table)
        p_value = max(change.p_value, crossed.p_value)
        change = replace(
            change,
            interval=_widen(change.interval, crossed.interval(), lowest=-1.0),
            p_value=p_value,
            corrected_p_value=p_value,
            detectable=max(change.detectable, crossed.detectable()),
        )
    return SeedChange(
        change=replace(change, n_left_out=_count_tasks([before, after]) - len(keys)),
        seeds=seeds,
        difference_by_seed={
            seed: fmean(row[column] for row in table) for column, seed in enumerate(seeds)
        },
    )


def _is_crossed(table: Sequence[Sequence[float]]) -> bool:
    return len(table) > 1 and len(table[0]) > 1


def _widen(one: Interval, other: Interval, *, lowest: float) -> Interval:
    return max(lowest, min(one[0], other[0])), min(1.0, max(one[1], other[1]))


def _find_common_tasks(sides: Sequence[Reports]) -> list[str]:
    """The keys of the tasks that are graded, with the same content, in every report."""
    reports = [report for side in sides for report in side.values()]
    thresholds = sorted({report.pass_threshold for report in reports})
    if len(thresholds) > 1:
        raise TaskError(f"the pass thresholds differ: {thresholds}; evaluate with the same one")
    check_same_code(reports)
    graded = [{key for key, one in report.outcomes.items() if one.rewards} for report in reports]
    common = sorted(set.intersection(*graded)) if graded else []
    common = [key for key in common if _has_one_content(key, reports)]
    if not common:
        name = reports[0].name if reports else "the set"
        raise TaskError(
            f"{name!r} has no task that is graded in every run; see why grades are missing, or "
            "evaluate all runs on the same tasks"
        )
    return common


def _has_one_content(key: str, reports: Sequence[EvalReport]) -> bool:
    hashes = {report.outcomes[key].content_hash for report in reports}
    return len(hashes - {None}) <= 1


def _count_tasks(sides: Sequence[Reports]) -> int:
    return len({key for side in sides for report in side.values() for key in report.outcomes})


def _merge(key: str, reports: Reports) -> TaskOutcome:
    """The attempts of all seeds as attempts at one task."""
    outcomes = [report.outcomes[key] for report in reports.values()]
    return replace(
        outcomes[0],
        successes=sum(outcome.successes for outcome in outcomes),
        rewards=tuple(reward for outcome in outcomes for reward in outcome.rewards),
        unknown=sum(outcome.unknown for outcome in outcomes),
    )


def _merge_reports(keys: Sequence[str], reports: Reports) -> EvalReport:
    first = next(iter(reports.values()))
    outcomes = {key: _merge(key, reports) for key in keys}
    return replace(
        first,
        overall=EnvScore.from_outcomes(list(outcomes.values())),
        by_env={},
        outcomes=outcomes,
    )
