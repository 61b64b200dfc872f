"""Signals: what each environment had to teach, over the run and lately."""

from __future__ import annotations

from collections.abc import Sequence

from skyfleet.analysis.html.blocks import columns, grid, note, section, table
from skyfleet.analysis.html.charts import Series, line_chart
from skyfleet.analysis.html.curves import run_legend, value_range
from skyfleet.analysis.html.findings import Findings
from skyfleet.analysis.html.markup import Child, Html, join, tag
from skyfleet.analysis.html.shown_run import training_envs
from skyfleet.analysis.html.windows import mixed_shares, prompts_of
from skyfleet.analysis.html.wording import NOTHING, PERCENT, count, number, percent
from skyfleet.analysis.signal import GROUP_SIZES, EnvSignal

_COLUMNS = columns(
    *("Environment", "Groups, run", "Attempts each, run", "Pass rate, run", "Pass rate, lately"),
    *("Mixed, run", "Mixed, lately", "Variance a prompt, run", "Variance a prompt, lately"),
    *("Steps with signal, run", "Steps with signal, lately", "Wasted attempts, run"),
    text=("Environment",),
)


def signal_section(findings: Sequence[Findings]) -> Html:
    runs = [one.run for one in findings]
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
            "differ, teaches. Run: over all steps; lately: over the last quarter of them. A step "
            "with signal has a mixed group. Wasted: nothing was learned from the attempt."
        ),
        [_tables(one) for one in findings if one.signals],
        tag("h3", "Share of mixed groups"),
        run_legend(runs),
        grid(drawn, span=3),
    )


def _tables(findings: Findings) -> Html:
    title, signals = findings.run.title, findings.signals.values()
    sizes = [f"Of {size}" for size in GROUP_SIZES]
    expected = [
        [signal.env_key, *(_share(signal.mixed_at.get(size)) for size in GROUP_SIZES)]
        for signal in signals
    ]
    return join(
        table(f"{title}: signal by environment", _COLUMNS, map(_row, signals)),
        table(
            f"{title}: expected share of mixed groups by their size, as it passed lately",
            columns("Environment", *sizes, text=("Environment",)),
            expected,
        ),
    )


def _row(signal: EnvSignal) -> list[Child]:
    run, lately = signal.over_run, signal.lately
    return [
        signal.env_key,
        count(run.n_groups),
        count(signal.group_size),
        percent(run.pass_rate),
        percent(lately.pass_rate),
        percent(run.mixed_groups),
        percent(lately.mixed_groups),
        number(run.variance_per_prompt),
        number(lately.variance_per_prompt),
        percent(run.steps_with_signal),
        percent(lately.steps_with_signal),
        percent(run.n_wasted / run.n_attempts),
    ]


def _share(share: float | None) -> str:
    return NOTHING if share is None else percent(share)
