"""Comparisons: which evaluations of the runs are held against each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from skyfleet.analysis.html.shown_run import ShownRun
from skyfleet.errors import TaskError
from skyfleet.evaluation.compare import Comparison, compare
from skyfleet.evaluation.report import EvalReport

Pairs = Iterable[tuple[EvalReport, EvalReport]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What one table shows, and what could not be compared."""

    caption: str
    sides: tuple[str, str]
    """`before` and `after`, or the letters of two runs."""
    comparisons: tuple[Comparison, ...]
    excuses: tuple[str, ...]


def within_runs(runs: Sequence[ShownRun]) -> list[Compared]:
    """Each run's first evaluation with its last."""
    return [
        _compared(f"{run.title}: first evaluation to last", ("before", "after"), _ends(run))
        for run in runs
    ]


def between_runs(runs: Sequence[ShownRun]) -> list[Compared]:
    """The first run's last evaluation with every other's."""
    first, *others = runs
    return [
        _compared(
            f"{first.title} against {run.title}: last evaluation of each",
            (first.mark, run.mark),
            _lasts(first, run),
            excuses=_unshared(first, run),
        )
        for run in others
    ]


def _ends(run: ShownRun) -> Pairs:
    for by_step in run.reports.values():
        if len(by_step) > 1:
            yield by_step[min(by_step)], by_step[max(by_step)]


def _lasts(one: ShownRun, other: ShownRun) -> Pairs:
    for name, by_step in one.reports.items():
        if others := other.reports.get(name):
            yield by_step[max(by_step)], others[max(others)]


def _unshared(one: ShownRun, other: ShownRun) -> Iterable[str]:
    """What one run was evaluated on and the other was not."""
    if not one.reports.keys() & other.reports.keys():
        yield (
            f"{one.title} and {other.title} share no evaluation set and are not compared: "
            f"{_sets(one)}; {_sets(other)}."
        )
        return
    for has, lacks in ((one, other), (other, one)):
        for name in sorted(has.reports.keys() - lacks.reports.keys()):
            yield f"{name} was evaluated in {has.title} only."


def _sets(run: ShownRun) -> str:
    return f"{run.title} has {', '.join(run.reports) or 'none'}"


def _compared(
    caption: str, sides: tuple[str, str], pairs: Pairs, *, excuses: Iterable[str] = ()
) -> Compared:
    comparisons, reasons = [], list(excuses)
    for before, after in pairs:
        try:
            comparisons.append(compare(before, after))
        except TaskError as error:
            reasons.append(f"{error}.")
    return Compared(
        caption=caption, sides=sides, comparisons=tuple(comparisons), excuses=tuple(reasons)
    )
