"""Failure shifts: why evaluation episodes were lost, before and after."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from skyfleet.analysis.failure_class import FailureClass
from skyfleet.analysis.failure_shift import PASSED, Shift, class_shifts
from skyfleet.analysis.html.bars import interval_cell
from skyfleet.analysis.html.blocks import (
    columns,
    command,
    fold,
    grid,
    note,
    paragraphs,
    section,
    table,
)
from skyfleet.analysis.html.evaluated_set import Evaluated, EvaluatedSet
from skyfleet.analysis.html.findings import Findings
from skyfleet.analysis.html.markup import Child, Html, join, tag
from skyfleet.analysis.html.scale import round_range
from skyfleet.analysis.html.shown_run import ShownRun
from skyfleet.analysis.html.wording import percent, points


def failure_section(findings: Sequence[Findings]) -> Html:
    found = [one for one in findings if one.sets]
    if not found:
        return section("failures", "Failures", note("No evaluation episode was recorded."))
    return section(
        "failures",
        "Failures",
        note(
            "Share of a set's episodes by how they ended, at its first and its last evaluation, "
            "over the tasks that both have. Grey: the 95 % interval of the change holds zero."
        ),
        [
            join(
                grid(_cards(one), span=6),
                paragraphs(excuse for of_set in one.sets for excuse in of_set.excuses),
            )
            for one in found
        ],
    )


def _cards(findings: Findings) -> Iterator[Html]:
    run = findings.run
    for one in findings.sets:
        if one.ends:
            title = f"{run.title}: {one.name}" if run.mark else one.name
            yield join(_table(title, one), _examples(run, one.ends[-1]))


def _table(title: str, one: EvaluatedSet) -> Html:
    if one.pair is None:
        (end,) = one.ends
        shares = class_shifts(end.ended, end.ended)
        head = columns("Ending", f"Step {end.step}", text=("Ending",))
        return table(title, head, [(shift.name, percent(shift.after)) for shift in shares])
    before, after = one.pair
    shifts = class_shifts(before.ended, after.ended)
    if not shifts:
        return note(f"{title}: no task was played at step {before.step} and at step {after.step}.")
    reach = max(round_range(abs(end) for shift in shifts for end in shift.interval))
    steps = (f"Step {before.step}", f"Step {after.step}")
    head = columns(*("Ending", *steps, "Points", "95 % interval", ""), text=("Ending",), draw=("",))
    quiet = [at for at, shift in enumerate(shifts) if not shift.clear]
    return table(title, head, (_row(shift, reach) for shift in shifts), quiet=quiet)


def _row(shift: Shift, reach: float) -> list[Child]:
    low, high = shift.interval
    return [
        shift.name,
        percent(shift.before),
        percent(shift.after),
        points(shift.difference),
        f"{points(low)} to {points(high)}",
        interval_cell(
            low, shift.difference, high, reach=reach, more_is_better=shift.name == PASSED
        ),
    ]


def _examples(run: ShownRun, evaluated: Evaluated) -> Html:
    first: dict[str, str] = {}
    for entry, _, failure in evaluated.episodes:
        first.setdefault(str(failure or PASSED), entry.id)
    items = [
        tag("li", f"{name}: ", command(run.view_command(entry_id)))
        for name in (PASSED, *FailureClass)
        if (entry_id := first.get(name))
    ]
    return fold(f"One of each to read, step {evaluated.step}", tag("ul", items, class_="plain"))
