"""Curves: success in every evaluation, and the reward of training, environment by environment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from skyfleet.analysis.html.blocks import grid, legend, note, section
from skyfleet.analysis.html.charts import Point, Series, line_chart, slot_class
from skyfleet.analysis.html.markup import Html, join, tag
from skyfleet.analysis.html.scale import round_range
from skyfleet.analysis.html.shown_run import ShownRun, training_envs
from skyfleet.analysis.html.windows import mean_rewards, prompts_of
from skyfleet.analysis.html.wording import NUMBER, PERCENT, count
from skyfleet.evaluation.report import EvalReport


def curve_section(runs: Sequence[ShownRun]) -> Html:
    return section(
        "curves", "Learning curves", run_legend(runs), _evaluations(runs), _training(runs)
    )


def run_legend(runs: Sequence[ShownRun]) -> Html | None:
    """Which colour and letter is which run; one alone needs none."""
    if len(runs) == 1:
        return None
    return legend((slot_class(run.slot), run.title) for run in runs)


def value_range(series: Iterable[Series]) -> tuple[float, float]:
    """One for all charts that are compared by eye."""
    points = [point for one in series for point in one.points]
    ends = (end for point in points for end in point.interval or ())
    return round_range([*(point.value for point in points), *ends])


def _evaluations(runs: Sequence[ShownRun]) -> Html:
    names = list(dict.fromkeys(name for run in runs for name in run.reports))
    charts = {name: _of_set(runs, name) for name in names}
    if not charts:
        return note("No evaluation was recorded.")
    y_range = value_range(s for of_set in charts.values() for one in of_set.values() for s in one)
    drawn = [
        line_chart(f"{name} · {scope}", series, y_range=y_range, unit=PERCENT)
        for name, of_set in charts.items()
        for scope, series in of_set.items()
    ]
    return join(
        tag("h3", "pass@1 in evaluation"), note("Bands are 95 % intervals."), grid(drawn, span=3)
    )


def _of_set(runs: Sequence[ShownRun], name: str) -> dict[str, list[Series]]:
    """By scope, `all` first where there are several environments."""
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


def _training(runs: Sequence[ShownRun]) -> Html:
    charts = {
        env_key: [
            Series(
                label=run.mark,
                slot=run.slot,
                points=mean_rewards(prompts_of(e for e in run.training if e.env_key == env_key)),
            )
            for run in runs
        ]
        for env_key in training_envs(runs)
    }
    if not charts:
        return note("No training episode was recorded.")
    y_range = value_range(series for of_env in charts.values() for series in of_env)
    drawn = [
        line_chart(env_key, series, y_range=y_range, unit=NUMBER)
        for env_key, series in charts.items()
    ]
    return join(
        tag("h3", "Reward in training"),
        note(
            "Mean over prompts in a window of an eighth of the steps; bands are 95 % intervals, "
            "and there is none where all prompts were alike."
        ),
        grid(drawn, span=3),
    )
