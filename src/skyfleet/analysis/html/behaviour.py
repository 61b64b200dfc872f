"""Behaviour and failures of the evaluation episodes, at the first and last evaluation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from skyfleet.analysis.before_after import (
    PASSED,
    PLAIN_QUANTITIES,
    BehaviourChange,
    FailureShift,
    compute_failure_shifts,
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
from skyfleet.analysis.html.page_data import EvaluatedSet, EvaluatedStep, ReportRun, RunFindings


def behaviour_table(findings: RunFindings) -> Html | None:
    """Turns, calls, errors and tokens per episode, first evaluation to last."""
    changes, title = findings.changes, findings.run.title
    if not changes:
        return None
    head = columns(
        *("Set", "Environment", *map(str.capitalize, PLAIN_QUANTITIES)),
        text=("Set", "Environment"),
    )
    return join(
        table(
            f"{title}: behaviour per episode, first evaluation to last",
            head,
            [row for name, in_set in changes.items() for row in _behaviour_rows(name, in_set)],
        ),
        note(
            "↑ and ↓: the 95 % interval of the difference, resampling tasks, excludes zero. "
            "Grey: it contains zero."
        ),
        _clear_changes_table(title, changes),
    )


def _behaviour_rows(name: str, changes: Sequence[BehaviourChange]) -> list[list[Child]]:
    by_env: dict[str, dict[str, Child]] = defaultdict(dict)
    for change in changes:
        by_env[change.env_key][change.quantity] = _behaviour_cell(change)
    return [
        [name, env_key, *(cells[quantity] for quantity in PLAIN_QUANTITIES)]
        for env_key, cells in by_env.items()
    ]


def _behaviour_cell(change: BehaviourChange) -> Child:
    if not change.is_measured:
        return NOTHING
    text = f"{number(change.before)} → {number(change.after)}"
    if not change.is_clear:
        return tag("span", text, class_="unclear")
    return tag("span", f"{'↑' if change.difference > 0 else '↓'} {text}", class_="clear")


def _clear_changes_table(title: str, changes: Mapping[str, Sequence[BehaviourChange]]) -> Html:
    everything = [(name, change) for name, in_set in changes.items() for change in in_set]
    clear = [(name, change) for name, change in everything if change.is_clear]
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
        *("Set", "Environment", "Per episode", "Tasks", "Before", "After", "Difference"),
        "95 % interval",
        text=("Set", "Environment", "Per episode"),
    )
    return fold(
        f"{title}: every clear change with its interval, tools included "
        f"({count(len(clear))} of {count(len(everything))})",
        table(f"{title}: clear changes", head, rows),
    )


def failure_section(findings: Sequence[RunFindings]) -> Html:
    found = [one for one in findings if one.sets]
    if not found:
        return section("failures", "Failures", note("No evaluation episodes are recorded."))
    return section(
        "failures",
        "Failures",
        note(
            "Share of a set's episodes by failure class, at its first and last evaluation, over "
            "the tasks in both. Grey: the 95 % interval of the change contains zero."
        ),
        [
            join(
                grid(_cards(one), span=6),
                paragraphs(text for evaluated in one.sets for text in evaluated.notes),
            )
            for one in found
        ],
    )


def _cards(findings: RunFindings) -> Iterator[Html]:
    run = findings.run
    for one in findings.sets:
        if one.ends:
            title = f"{run.title}: {one.name}" if run.mark else one.name
            yield join(_failure_table(title, one), _examples(run, one.ends[-1]))


def _failure_table(title: str, one: EvaluatedSet) -> Html:
    if one.pair is None:
        (end,) = one.ends
        shifts = compute_failure_shifts(end.outcomes, end.outcomes)
        head = columns("Outcome", f"Step {end.step}", text=("Outcome",))
        return table(title, head, [(shift.name, percent(shift.after)) for shift in shifts])
    before, after = one.pair
    shifts = compute_failure_shifts(before.outcomes, after.outcomes)
    if not shifts:
        return note(f"{title}: steps {before.step} and {after.step} have no task in common.")
    half_width = max(round_range(abs(end) for shift in shifts for end in shift.interval))
    steps = (f"Step {before.step}", f"Step {after.step}")
    head = columns(
        *("Outcome", *steps, "Points", "95 % interval", ""), text=("Outcome",), draw=("",)
    )
    quiet = [at for at, shift in enumerate(shifts) if not shift.is_clear]
    return table(title, head, (_failure_row(shift, half_width) for shift in shifts), quiet=quiet)


def _failure_row(shift: FailureShift, half_width: float) -> list[Child]:
    low, high = shift.interval
    return [
        shift.name,
        percent(shift.before),
        percent(shift.after),
        points(shift.difference),
        f"{points(low)} to {points(high)}",
        interval_cell(
            low, shift.difference, high, half_width=half_width, more_is_better=shift.name == PASSED
        ),
    ]


def _examples(run: ReportRun, evaluated: EvaluatedStep) -> Html:
    first: dict[str, str] = {}
    for entry, _, failure in evaluated.episodes:
        first.setdefault(str(failure or PASSED), entry.id)
    items = [
        tag("li", f"{name}: ", command(run.view_command(entry_id)))
        for name in (PASSED, *FailureClass)
        if (entry_id := first.get(name))
    ]
    return fold(f"One example per class, step {evaluated.step}", tag("ul", items, class_="plain"))
