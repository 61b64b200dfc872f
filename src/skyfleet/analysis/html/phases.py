"""Phases: where the time went."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from skyfleet.analysis.html.bars import share_cell
from skyfleet.analysis.html.blocks import columns, grid, note, section, table
from skyfleet.analysis.html.charts import Point, Series, line_chart
from skyfleet.analysis.html.curves import run_legend, value_range
from skyfleet.analysis.html.markup import Html, tag
from skyfleet.analysis.html.shown_run import ShownRun
from skyfleet.analysis.html.wording import SECONDS, count, percent, seconds

_PREFIX = "timing/"
_MOST_POINTS = 60
_SMALL_SHARE = 0.01
"""A phase that takes less of the time has no chart."""


def phase_section(runs: Sequence[ShownRun]) -> Html:
    timed = [run for run in runs if run.timing]
    if not timed:
        return section("time", "Time", note("No times were recorded."))
    return section(
        "time",
        "Time",
        grid([_table(run) for run in timed], span=6 if len(timed) > 1 else 12),
        tag("h3", "Seconds a step"),
        run_legend(runs),
        grid(_charts(timed), span=3),
    )


def phase_seconds(run: ShownRun) -> dict[str, list[tuple[int, float]]]:
    """By phase, its steps and their seconds; the longest phase first."""
    phases: dict[str, list[tuple[int, float]]] = {}
    for row in run.timing:
        for key, value in row.items():
            if key.startswith(_PREFIX):
                phases.setdefault(key.removeprefix(_PREFIX), []).append((int(row["step"]), value))
    return dict(sorted(phases.items(), key=lambda item: -_total(item[1])))


def total_seconds(run: ShownRun) -> float:
    return sum(_total(rows) for rows in phase_seconds(run).values())


def _total(rows: Sequence[tuple[int, float]]) -> float:
    return sum(value for _, value in rows)


def _table(run: ShownRun) -> Html:
    phases, whole = phase_seconds(run), total_seconds(run)
    rows = [
        (
            phase,
            seconds(_total(rows)),
            percent(_total(rows) / whole if whole else 0.0),
            share_cell(_total(rows) / whole if whole else 0.0),
            count(len(rows)),
            seconds(median(value for _, value in rows)),
        )
        for phase, rows in phases.items()
    ]
    head = columns(*("Phase", "Total", "Share", "", "Times", "Median"), text=("Phase",), draw=("",))
    return table(f"{run.title}: {seconds(whole)} in measured phases", head, rows)


def _charts(runs: Sequence[ShownRun]) -> list[Html]:
    """Only what happens at many steps is a curve."""
    by_run = [(run, phase_seconds(run), total_seconds(run)) for run in runs]
    charts = []
    for name in dict.fromkeys(name for _, phases, _ in by_run for name in phases):
        series = [
            Series(label=run.mark, slot=run.slot, points=_thinned(phases.get(name, [])))
            for run, phases, whole in by_run
            if _total(phases.get(name, [])) > _SMALL_SHARE * whole
        ]
        if any(len(one.points) > 2 for one in series):
            charts.append(line_chart(name, series, y_range=value_range(series), unit=SECONDS))
    return charts


def _thinned(rows: Sequence[tuple[int, float]]) -> tuple[Point, ...]:
    """Medians of neighbours, so that a long run is still a short list."""
    size = -(-len(rows) // _MOST_POINTS) or 1
    chunks = [rows[at : at + size] for at in range(0, len(rows), size)]
    return tuple(
        Point(step=chunk[-1][0], value=median(value for _, value in chunk)) for chunk in chunks
    )
