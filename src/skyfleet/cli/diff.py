"""`skyfleet diff`: the change of behaviour between two steps or two runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from skyfleet.analysis.formatting import NOTHING, format_count, format_steps, table
from skyfleet.cli.analyze import NAME_CHARACTERS, TOOLS
from skyfleet.cli.run_tasks import RunPath
from skyfleet.errors import ConfigError
from skyfleet.terminal import print, sanitize

if TYPE_CHECKING:
    from skyfleet.analysis.before_after import BehaviourChange, Row
    from skyfleet.analysis.run_folder import OnDamage, RunFolder
    from skyfleet.trajectories.entry import Entry
    from skyfleet.trajectories.records import RecordError
    from skyfleet.trajectories.trajectory import Trajectory, Turn

Side = Mapping[str, "Sequence[Entry]"]
"""The episodes of one step, by evaluation set."""


def diff_command(
    run: RunPath,
    other: Annotated[
        str | None, typer.Argument(help="The second run; by default the same.")
    ] = None,
    set_name: Annotated[str | None, typer.Option("--eval-set", help="One evaluation set.")] = None,
    before: Annotated[
        int | None, typer.Option(help="Step; by default the first, or of two runs the last.")
    ] = None,
    after: Annotated[int | None, typer.Option(help="Step; by default the last.")] = None,
    task: Annotated[
        str | None, typer.Option(help="Show this task's first attempts side by side.")
    ] = None,
) -> None:
    """Compare behaviour, not grades: turns, calls, errors, tokens, tools."""
    from skyfleet.analysis.run_folder import open_run

    folders = open_run(run), open_run(other or run)
    damage: list[RecordError] = []
    one = _side(folders[0], set_name, before, "--before", damage.append, last=other is not None)
    two = _side(folders[1], set_name, after, "--after", damage.append, last=True)
    if task is not None:
        _show_task(task, one, two)
        return
    rows, compared = [], []
    for name in [name for name in one if name in two]:
        steps = f"{folders[0].name} step {one[name][0].step}, {folders[1].name} step {two[name][0].step}"
        compared.append(sanitize(f"{name}: {steps}"))
        rows += [(name, *row) for row in _rows(one[name], two[name], damage.append)]
    if not rows:
        if damage:
            raise damage[0]
        raise ConfigError(
            f"{run} and {other or run} have no task in common; choose another --eval-set"
        )
    header = ("set", "environment", "per episode", "tasks", "before", "after", "difference", "95 %")
    # Within one run both sides may read the same damaged file.
    left_out = dict.fromkeys(f"Left out: {sanitize(str(error))}" for error in damage)
    print("\n".join([*compared, *left_out]), table(header, rows), sep="\n\n")


def print_rows(rows: Iterable[Row], names: tuple[str, str]) -> None:
    """Print two episodes: `=` for equal turns, `-` and `+` for turns of the first and the second."""
    from skyfleet.analysis.before_after import format_action

    print(f"- {names[0]}\n+ {names[1]}\n")
    for one, other in rows:
        if one and other and format_action(one.action) == format_action(other.action):
            _print_turn("=", one)
        else:
            _print_turn("-", one)
            _print_turn("+", other)


def _print_turn(sign: str, turn: Turn | None) -> None:
    from skyfleet.analysis.before_after import format_action

    if turn is None:
        return
    printed = [format_action(turn.action), *(f"  {reply.text}" for reply in turn.replies)]
    for line in "\n".join(printed).splitlines():
        print(f"{sign} {sanitize(line)}")


def _rows(
    before: Sequence[Entry], after: Sequence[Entry], on_damage: OnDamage
) -> Iterator[tuple[str, ...]]:
    from skyfleet.analysis.before_after import PLAIN_QUANTITIES, compare_behaviour
    from skyfleet.analysis.run_folder import read_entries

    by_env: dict[str, list[BehaviourChange]] = defaultdict(list)
    sides = ((t for _, t in read_entries(side, on_damage=on_damage)) for side in (before, after))
    for change in compare_behaviour(*sides):
        by_env[change.env_key].append(change)
    for changes in by_env.values():
        tools = [change for change in changes if change.quantity not in PLAIN_QUANTITIES]
        tools.sort(key=lambda change: -change.before - change.after)
        shown_tools, others = tools[:TOOLS], tools[TOOLS:]
        yield from (_row(change) for change in changes if change.quantity in PLAIN_QUANTITIES)
        yield from map(_row, shown_tools)
        if others:
            yield _row_of_others(others)


def _row(change: BehaviourChange) -> tuple[str, ...]:
    low, high = change.interval
    numbers = (
        f"{change.before:.2f}",
        f"{change.after:.2f}",
        f"{change.difference:+.2f}",
        f"{low:+.2f} to {high:+.2f}",
    )
    quantity = sanitize(change.quantity, at_most=len("calls of ") + NAME_CHARACTERS)
    cells = numbers if change.is_measured else (NOTHING,) * len(numbers)
    return change.env_key, quantity, str(change.n_tasks), *cells


def _row_of_others(changes: Sequence[BehaviourChange]) -> tuple[str, ...]:
    before, after = sum(c.before for c in changes), sum(c.after for c in changes)
    return (
        changes[0].env_key,
        f"calls of {format_count(len(changes), 'other name')}",
        str(changes[0].n_tasks),
        f"{before:.2f}",
        f"{after:.2f}",
        f"{after - before:+.2f}",
        NOTHING,
    )


def _show_task(key: str, before: Side, after: Side) -> None:
    from skyfleet.analysis.before_after import align_turns, find_first_divergence

    for name in before:
        one, other = _first(key, before[name]), _first(key, after.get(name, ()))
        if one and other:
            at = find_first_divergence(one, other)
            same = "The actions are the same."
            print(same if at is None else f"The actions differ from turn {at + 1}.")
            print_rows(align_turns(one, other), ("before", "after"))
            return
    attempted = [
        {e.task_key for entries in side.values() for e in entries} for side in (before, after)
    ]
    some = ", ".join(sorted(attempted[0] & attempted[1])[:3])
    raise ConfigError(
        f"--task {key}: has no attempts on both sides; tasks that have: {sanitize(some)}, …"
    )


def _first(key: str, entries: Iterable[Entry]) -> Trajectory | None:
    from skyfleet.trajectories.archive import load

    entry = next((entry for entry in entries if entry.task_key == key), None)
    return load(entry) if entry else None


def _side(
    folder: RunFolder,
    set_name: str | None,
    step: int | None,
    option: str,
    on_damage: OnDamage,
    *,
    last: bool,
) -> Side:
    """The episodes at `step` by set; without a step, at the last or the first one."""
    sets: dict[str, dict[int, list[Entry]]] = defaultdict(lambda: defaultdict(list))
    for entry in folder.entries(on_damage=on_damage):
        if entry.kind == "eval":
            sets[entry.set_name][entry.step].append(entry)
    if not sets:
        raise ConfigError(f"{folder.place} has no evaluation episodes yet")
    if set_name not in (None, *sets):
        raise ConfigError(f"--eval-set {set_name}: {folder.place} has {', '.join(sets)}")
    selected = {name: steps for name, steps in sets.items() if set_name in (None, name)}
    if step is None:
        return {name: steps[max(steps) if last else min(steps)] for name, steps in selected.items()}
    chosen = {name: steps[step] for name, steps in selected.items() if step in steps}
    if not chosen:
        known = format_steps({step for steps in selected.values() for step in steps})
        raise ConfigError(f"{option} {step}: {folder.place} was evaluated at {known}")
    return chosen
