"""Failure shifts: why evaluation episodes were lost, before and after."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from skyfleet.analysis.before_after import (
    PASSED,
    PLAIN_QUANTITIES,
    BehaviourChange,
    Shift,
    class_shifts,
)
from skyfleet.analysis.failure_class import FailureClass
from skyfleet.analysis.html.bars import interval_cell
from skyfleet.analysis.html.charts import round_range
from skyfleet.analysis.html.elements import (
    Child,
    Html,
    columns,
    command,
    fold,
    grid,
    join,
    note,
    paragraphs,
    section,
    table,
    tag,
)
from skyfleet.analysis.html.formatting import NOTHING, count, number, percent, points, signed
from skyfleet.analysis.html.page_data import Evaluated, EvaluatedSet, Findings, ShownRun


def behaviour_table(findings: Findings) -> Html | None:
    """Turns, calls, errors and tokens an episode, first evaluation to last."""
    changes, title = findings.changes, findings.run.title
    if not changes:
        return None
    head = columns(
        *("Set", "Environment", *map(str.capitalize, PLAIN_QUANTITIES)),
        text=("Set", "Environment"),
    )
    return join(
        table(
            f"{title}: what it does in an episode, first evaluation to last",
            head,
            [row for name, of_set in changes.items() for row in _rows(name, of_set)],
        ),
        note(
            "↑ and ↓ where the 95 % interval of the difference, resampling tasks, is without zero; "
            "grey where it could be chance."
        ),
        _every_change(title, changes),
    )


def _rows(name: str, changes: Sequence[BehaviourChange]) -> list[list[Child]]:
    by_env: dict[str, dict[str, Child]] = defaultdict(dict)
    for change in changes:
        by_env[change.env_key][change.quantity] = _cell(change)
    return [
        [name, env_key, *(cells[quantity] for quantity in PLAIN_QUANTITIES)]
        for env_key, cells in by_env.items()
    ]


def _cell(change: BehaviourChange) -> Child:
    if not change.measured:
        return NOTHING
    said = f"{number(change.before)} → {number(change.after)}"
    if not change.clear:
        return tag("span", said, class_="unclear")
    return tag("span", f"{'↑' if change.difference > 0 else '↓'} {said}", class_="clear")


def _every_change(title: str, changes: Mapping[str, Sequence[BehaviourChange]]) -> Html:
    clear = [(name, change) for name, of_set in changes.items() for change in of_set]
    total = len(clear)
    clear = [(name, change) for name, change in clear if change.clear]
    rows = [
        (
            name,
            change.env_key,
            change.quantity,
            count(change.n_tasks),
            number(change.before),
            number(change.after),
            signed(change.difference),
            f"{signed(change.interval[0])} to {signed(change.interval[1])}",
        )
        for name, change in clear
    ]
    head = columns(
        *("Set", "Environment", "In an episode", "Tasks", "Before", "After", "Difference"),
        "95 % interval",
        text=("Set", "Environment", "In an episode"),
    )
    return fold(
        f"{title}: every clear change with its interval, tools included "
        f"({count(len(clear))} of {count(total)})",
        table(f"{title}: clear changes", head, rows),
    )


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
