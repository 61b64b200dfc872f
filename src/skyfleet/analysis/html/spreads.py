"""Spreads: how rewards and lengths are distributed, early and late in training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite

from skyfleet.analysis.html.bars import Sample, histogram
from skyfleet.analysis.html.blocks import grid, legend, note, section
from skyfleet.analysis.html.charts import slot_class
from skyfleet.analysis.html.markup import Html, tag
from skyfleet.analysis.html.shown_run import ShownRun, first_and_last, training_envs
from skyfleet.analysis.html.wording import count
from skyfleet.trajectories.entry import Entry

_MEASURES: dict[str, Callable[[Entry], float | None]] = {
    "reward": lambda entry: entry.reward,
    "turns": lambda entry: entry.turns,
    "sampled tokens": lambda entry: entry.sampled_tokens,
}

Side = tuple[str, str, list[Entry]]
"""Label, class, episodes."""


def spread_section(runs: Sequence[ShownRun]) -> Html:
    sides = _sides(runs)
    if not any(entries for _, _, entries in sides):
        return section("spreads", "Rewards and lengths", note("No training episode was recorded."))
    unknown = sum(entry.reward is None for run in runs for entry in run.training)
    total = sum(len(run.training) for run in runs)
    charts = [
        grid([_chart(measure, env_key, sides) for measure in _MEASURES], span=4)
        for env_key in training_envs(runs)
    ]
    return section(
        "spreads",
        "Rewards and lengths",
        note(
            "Share of training episodes. A last bar also holds what lies beyond it. "
            f"{count(unknown)} of {count(total)} episodes have no known grade and are in no reward."
        ),
        legend((style, label) for label, style, _ in sides),
        tag("div", charts),
    )


def _sides(runs: Sequence[ShownRun]) -> list[Side]:
    """One run: its first quarter and its last. Several: the last quarter of each."""
    if len(runs) == 1:
        first, last = first_and_last(runs[0])
        return [
            (f"first quarter ({_steps(first)})", "before", first),
            (f"last quarter ({_steps(last)})", slot_class(0), last),
        ]
    lasts = [(run, first_and_last(run)[1]) for run in runs]
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
