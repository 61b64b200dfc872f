"""Behaviours: what a policy does differently at its last evaluation, whatever its reward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from skyfleet.analysis.before_after import PLAIN_QUANTITIES, BehaviourChange
from skyfleet.analysis.html.blocks import columns, fold, note, table
from skyfleet.analysis.html.findings import Findings
from skyfleet.analysis.html.markup import Child, Html, join, tag
from skyfleet.analysis.html.wording import NOTHING, count, number, signed


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
