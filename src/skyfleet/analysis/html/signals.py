"""Signals: what each environment had to teach, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence

from skyfleet.analysis.html.blocks import columns, grid, note, section, table
from skyfleet.analysis.html.charts import Series, line_chart
from skyfleet.analysis.html.curves import run_legend, value_range
from skyfleet.analysis.html.markup import Child, Html, tag
from skyfleet.analysis.html.shown_run import ShownRun, training_envs
from skyfleet.analysis.html.windows import mixed_shares, prompts_of
from skyfleet.analysis.html.wording import PERCENT, count, number, percent
from skyfleet.analysis.signal import EnvSignal, env_signals

_COLUMNS = columns(
    *("Environment", "Groups", "Attempts each", "Pass rate", "Mixed, whole run", "Mixed, lately"),
    *("Variance a prompt", "Wasted attempts", "Advice"),
    text=("Environment",),
    prose=("Advice",),
)


def signal_section(runs: Sequence[ShownRun]) -> Html:
    trained = [run for run in runs if run.training]
    if not trained:
        return section("signal", "Learning signal", note("No training episode was recorded."))
    charts = {
        env_key: [
            Series(
                label=run.mark,
                slot=run.slot,
                points=mixed_shares(prompts_of(e for e in run.training if e.env_key == env_key)),
            )
            for run in trained
        ]
        for env_key in training_envs(trained)
    }
    y_range = value_range(series for of_env in charts.values() for series in of_env)
    drawn = [
        line_chart(env_key, series, y_range=y_range, unit=PERCENT)
        for env_key, series in charts.items()
    ]
    return section(
        "signal",
        "Learning signal",
        note(
            "A group is the attempts at one task in one step; only a mixed one, whose rewards "
            "differ, teaches. Lately is the last quarter of the steps. Wasted: nothing was "
            "learned from the attempt."
        ),
        [_table(run) for run in trained],
        tag("h3", "Share of mixed groups"),
        run_legend(runs),
        grid(drawn, span=3),
    )


def _table(run: ShownRun) -> Html:
    signals = env_signals(run.training)
    return table(f"{run.title}: signal by environment", _COLUMNS, map(_row, signals.values()))


def _row(signal: EnvSignal) -> list[Child]:
    whole, lately = signal.over_run, signal.lately
    return [
        signal.env_key,
        count(whole.n_groups),
        count(signal.group_size),
        percent(lately.pass_rate),
        percent(whole.mixed_groups),
        percent(lately.mixed_groups),
        number(lately.variance_per_prompt),
        percent(whole.n_wasted / whole.n_attempts),
        signal.advice,
    ]
