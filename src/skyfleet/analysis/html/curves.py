"""Curves section: pass@1 per evaluation and training reward per environment."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil, isfinite, sqrt
from statistics import fmean, stdev

from skyfleet.analysis.html.charts import Point, Range, Series, line_chart, round_range, slot_class
from skyfleet.analysis.html.elements import Html, grid, join, legend, note, section, tag
from skyfleet.analysis.html.formatting import NUMBER, PERCENT, count
from skyfleet.analysis.html.page_data import ReportRun, training_envs
from skyfleet.evaluation.report import EvalReport
from skyfleet.metrics.intervals import wilson
from skyfleet.trajectories.entry import Entry

_MAX_POINTS = 60
_WINDOWS = 8
"""A window is an eighth of the steps."""
Prompts = Mapping[int, Sequence[Sequence[float]]]
"""By step, the rewards of each prompt's graded attempts."""
IntervalFn = Callable[[Sequence[float], Range], Range | None]
"""Takes the values of a window and the range of all values."""


def group_rewards_by_prompt(entries: Iterable[Entry]) -> Prompts:
    """Omits ungraded attempts, and prompts and steps without a graded one."""
    rewards: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for entry in entries:
        if entry.reward is not None and isfinite(entry.reward):
            rewards[entry.step][entry.task_key].append(entry.reward)
    return {step: list(rewards[step].values()) for step in sorted(rewards)}


def mean_rewards(prompts: Prompts) -> tuple[Point, ...]:
    """The mean over prompts of the mean reward of their attempts, with Student's interval."""
    return moving_mean(
        {step: [fmean(r) for r in in_step] for step, in_step in prompts.items()}, _student
    )


def mixed_shares(prompts: Prompts) -> tuple[Point, ...]:
    """The share of prompts with mixed rewards, with Wilson's interval.

    Omits prompts with a single graded attempt.
    """
    mixed = {
        step: [float(min(r) < max(r)) for r in in_step if len(r) > 1]
        for step, in_step in prompts.items()
    }
    return moving_mean(
        {step: values for step, values in mixed.items() if values},
        lambda values, _: wilson(fmean(values), len(values)),
    )


def moving_mean(
    values_by_step: Mapping[int, Sequence[float]], compute_interval: IntervalFn
) -> tuple[Point, ...]:
    """The mean in a window around each step, with the 95 % interval of its values."""
    steps = list(values_by_step)
    if not steps:
        return ()
    everything = [value for values in values_by_step.values() for value in values]
    bounds = min(everything), max(everything)
    half_width = len(steps) // _WINDOWS // 2
    stride = ceil(len(steps) / _MAX_POINTS)
    points = []
    # The last step always has a point.
    for at in sorted({*range(0, len(steps), stride), len(steps) - 1}):
        near = steps[max(0, at - half_width) : at + half_width + 1]
        values = [value for step in near for value in values_by_step[step]]
        points.append(
            Point(
                step=steps[at],
                value=fmean(values),
                interval=compute_interval(values, bounds),
                note=f", {count(len(values))} prompts",
            )
        )
    return tuple(points)


def _student(values: Sequence[float], bounds: Range) -> Range | None:
    """Clipped to the range of all values, so that a share does not fall below 0.

    None if all values are equal, because then their variance is unknown.
    """
    from scipy.special import stdtrit

    if min(values) == max(values):
        return None
    middle, n = fmean(values), len(values)
    half = float(stdtrit(n - 1, 0.975)) * stdev(values) / sqrt(n)
    return max(bounds[0], middle - half), min(bounds[1], middle + half)


def curve_section(runs: Sequence[ReportRun]) -> Html:
    return section(
        "curves", "Learning curves", run_legend(runs), _evaluations(runs), _training(runs)
    )


def run_legend(runs: Sequence[ReportRun]) -> Html | None:
    """The colours of the runs; None for a single run."""
    if len(runs) == 1:
        return None
    return legend((slot_class(run.slot), run.title) for run in runs)


def value_range(series: Iterable[Series]) -> tuple[float, float]:
    """One range for charts that a reader compares."""
    points = [point for one in series for point in one.points]
    ends = (end for point in points for end in point.interval or ())
    return round_range([*(point.value for point in points), *ends])


def _evaluations(runs: Sequence[ReportRun]) -> Html:
    names = list(dict.fromkeys(name for run in runs for name in run.reports))
    charts = {name: _set_series(runs, name) for name in names}
    if not charts:
        return note("No evaluations are recorded.")
    y_range = value_range(s for scopes in charts.values() for one in scopes.values() for s in one)
    drawn = [
        line_chart(f"{name} · {scope}", series, y_range=y_range, unit=PERCENT)
        for name, scopes in charts.items()
        for scope, series in scopes.items()
    ]
    return join(
        tag("h3", "pass@1 in evaluation"), note("Bands are 95 % intervals."), grid(drawn, span=3)
    )


def _set_series(runs: Sequence[ReportRun], name: str) -> dict[str, list[Series]]:
    """By scope; `all` comes first if there are several environments."""
    by_run = [(run, run.reports.get(name, {})) for run in runs]
    reports = [report for _, by_step in by_run for report in by_step.values()]
    envs = sorted({env_key for report in reports for env_key in report.by_env})
    scopes = [None, *envs] if len(envs) > 1 else envs
    return {
        scope or "all": [
            Series(label=run.mark, slot=run.slot, points=_points(by_step, scope))
            for run, by_step in by_run
        ]
        for scope in scopes
    }


def _points(by_step: Mapping[int, EvalReport], scope: str | None) -> tuple[Point, ...]:
    scores = (
        (step, report.overall if scope is None else report.by_env.get(scope))
        for step, report in sorted(by_step.items())
    )
    return tuple(
        Point(
            step=step,
            value=score.success_rate,
            interval=score.interval,
            note=f", {count(score.n_tasks)} tasks",
        )
        for step, score in scores
        if score is not None and score.success_rate is not None
    )


def _training(runs: Sequence[ReportRun]) -> Html:
    charts = {
        env_key: [
            Series(
                label=run.mark,
                slot=run.slot,
                points=mean_rewards(
                    group_rewards_by_prompt(e for e in run.training if e.env_key == env_key)
                ),
            )
            for run in runs
        ]
        for env_key in training_envs(runs)
    }
    if not charts:
        return note("No training episodes are recorded.")
    y_range = value_range(series for in_env in charts.values() for series in in_env)
    drawn = [
        line_chart(env_key, series, y_range=y_range, unit=NUMBER)
        for env_key, series in charts.items()
    ]
    return join(
        tag("h3", "Reward in training"),
        note(
            "Mean over prompts in a window of an eighth of the steps. Bands are 95 % intervals; "
            "there is none where all prompts have the same reward."
        ),
        grid(drawn, span=3),
    )
