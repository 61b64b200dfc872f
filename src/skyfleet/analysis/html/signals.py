"""Learning signal and reward distributions per environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite

from skyfleet.analysis.html.bars import Sample, histogram
from skyfleet.analysis.html.charts import Series, line_chart, slot_class
from skyfleet.analysis.html.curves import (
    group_rewards_by_prompt,
    mixed_shares,
    run_legend,
    value_range,
)
from skyfleet.analysis.html.elements import (
    Child,
    Html,
    columns,
    grid,
    join,
    legend,
    note,
    section,
    table,
    tag,
)
from skyfleet.analysis.html.formatting import NOTHING, PERCENT, count, number, percent
from skyfleet.analysis.html.page_data import (
    ReportRun,
    RunFindings,
    first_and_last_entries,
    training_envs,
)
from skyfleet.analysis.learning_signal import GROUP_SIZES, EnvSignal
from skyfleet.trajectories.entry import Entry

_COLUMNS = columns(
    *("Environment", "Groups, run", "Attempts each, run", "Pass rate, run", "Pass rate, recent"),
    *("Mixed, run", "Mixed, recent", "Variance per prompt, run", "Variance per prompt, recent"),
    *("Steps with signal, run", "Steps with signal, recent", "Wasted attempts, run"),
    text=("Environment",),
)
_MEASURES: dict[str, Callable[[Entry], float | None]] = {
    "reward": lambda entry: entry.reward,
    "turns": lambda entry: entry.turns,
    "sampled tokens": lambda entry: entry.sampled_tokens,
}
Side = tuple[str, str, list[Entry]]
"""Label, CSS class, episodes."""


def signal_section(findings: Sequence[RunFindings]) -> Html:
    runs = [one.run for one in findings]
    trained = [run for run in runs if run.training]
    if not trained:
        return section("signal", "Learning signal", note("No training episodes are recorded."))
    charts = {
        env_key: [
            Series(
                label=run.mark,
                slot=run.slot,
                points=mixed_shares(
                    group_rewards_by_prompt(e for e in run.training if e.env_key == env_key)
                ),
            )
            for run in trained
        ]
        for env_key in training_envs(trained)
    }
    y_range = value_range(series for in_env in charts.values() for series in in_env)
    drawn = [
        line_chart(env_key, series, y_range=y_range, unit=PERCENT)
        for env_key, series in charts.items()
    ]
    return section(
        "signal",
        "Learning signal",
        note(
            "A group is the attempts at one task in one step. Only mixed groups, whose rewards "
            "differ, have a learning signal. Run: over all steps; recent: over the last quarter. A "
            "step with signal has a mixed group. Wasted: attempts without a learning signal."
        ),
        [_tables(one) for one in findings if one.signals],
        tag("h3", "Share of mixed groups"),
        run_legend(runs),
        grid(drawn, span=3),
    )


def _tables(findings: RunFindings) -> Html:
    title, signals = findings.run.title, findings.signals.values()
    sizes = [f"Size {size}" for size in GROUP_SIZES]
    expected = [
        [signal.env_key, *(_share(signal.mixed_at.get(size)) for size in GROUP_SIZES)]
        for signal in signals
    ]
    return join(
        table(f"{title}: signal by environment", _COLUMNS, map(_row, signals)),
        table(
            f"{title}: expected share of mixed groups by group size, at the recent pass rates",
            columns("Environment", *sizes, text=("Environment",)),
            expected,
        ),
    )


def _row(signal: EnvSignal) -> list[Child]:
    run, recent = signal.whole_run, signal.recent
    return [
        signal.env_key,
        count(run.n_groups),
        count(signal.group_size),
        percent(run.pass_rate),
        percent(recent.pass_rate),
        percent(run.mixed_groups),
        percent(recent.mixed_groups),
        number(run.variance_per_prompt),
        number(recent.variance_per_prompt),
        percent(run.steps_with_signal),
        percent(recent.steps_with_signal),
        percent(run.n_wasted / run.n_attempts),
    ]


def _share(share: float | None) -> str:
    return NOTHING if share is None else percent(share)


def distribution_section(runs: Sequence[ReportRun]) -> Html:
    sides = _sides(runs)
    if not any(entries for _, _, entries in sides):
        return section(
            "distributions", "Rewards and lengths", note("No training episodes are recorded.")
        )
    unknown = sum(entry.reward is None for run in runs for entry in run.training)
    total = sum(len(run.training) for run in runs)
    charts = [
        grid([_chart(measure, env_key, sides) for measure in _MEASURES], span=4)
        for env_key in training_envs(runs)
    ]
    return section(
        "distributions",
        "Rewards and lengths",
        note(
            "Share of training episodes. The last bar includes all higher values. "
            f"{count(unknown)} of {count(total)} episodes are ungraded and not in the rewards."
        ),
        legend((style, label) for label, style, _ in sides),
        tag("div", charts),
    )


def _sides(runs: Sequence[ReportRun]) -> list[Side]:
    """For one run its first and last quarter, for several the last quarter of each."""
    if len(runs) == 1:
        first, last = first_and_last_entries(runs[0])
        return [
            (f"first quarter ({_steps(first)})", "before", first),
            (f"last quarter ({_steps(last)})", slot_class(0), last),
        ]
    lasts = [(run, first_and_last_entries(run)[1]) for run in runs]
    return [(f"{run.title} ({_steps(last)})", slot_class(run.slot), last) for run, last in lasts]


def _steps(entries: Sequence[Entry]) -> str:
    steps = [entry.step for entry in entries]
    return f"steps {min(steps)} to {max(steps)}" if steps else "no steps"


def _chart(measure: str, env_key: str, sides: Sequence[Side]) -> Html:
    samples = [
        Sample(label=label, style=style, values=_values(measure, env_key, entries))
        for label, style, entries in sides
    ]
    return histogram(f"{env_key} · {measure}", samples)


def _values(measure: str, env_key: str, entries: Sequence[Entry]) -> tuple[float, ...]:
    values = (_MEASURES[measure](entry) for entry in entries if entry.env_key == env_key)
    return tuple(value for value in values if value is not None and isfinite(value))
