"""`skyfleet diff`: how behaviour changed between two steps, or between two runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyfleet.cli.run_tasks import RunPath
from skyfleet.cli.tables import table
from skyfleet.errors import ConfigError

if TYPE_CHECKING:
    from skyfleet.analysis.before_after import Row
    from skyfleet.trajectories.entry import Entry
    from skyfleet.trajectories.trajectory import Trajectory, Turn


def diff_command(
    run: RunPath,
    other: Annotated[
        Path | None, typer.Argument(help="The run after; by default the same.")
    ] = None,
    set_name: Annotated[str | None, typer.Option("--set", help="One evaluation set.")] = None,
    before: Annotated[int | None, typer.Option(help="Step; by default the first.")] = None,
    after: Annotated[int | None, typer.Option(help="Step; by default the last.")] = None,
    task: Annotated[
        str | None, typer.Option(help="Show this task's first attempts side by side.")
    ] = None,
) -> None:
    """Compare what was done, not how it was graded: turns, calls, errors, tokens, tools."""
    from skyfleet.analysis.before_after import behaviour_changes
    from skyfleet.analysis.run_folder import open_run

    one = _episodes(open_run(run).entries(), set_name, before, last=False)
    two = _episodes(open_run(other or run).entries(), set_name, after, last=True)
    if task is not None:
        _show_task(task, one, two)
        return
    changes = behaviour_changes(one, two)
    if not changes:
        raise ConfigError(f"{run} and {other or run} have no task in common; choose another --set")
    rows = [
        (
            change.env_key,
            change.quantity,
            str(change.n_tasks),
            f"{change.before:.2f}",
            f"{change.after:.2f}",
            f"{change.difference:+.2f}",
            f"{change.interval[0]:+.2f} to {change.interval[1]:+.2f}",
        )
        for change in changes
    ]
    header = ("environment", "per episode", "tasks", "before", "after", "difference", "95 %")
    print(table(header, rows))


def print_rows(rows: Iterable[Row], names: tuple[str, str]) -> None:
    """Two episodes: `=` where both did the same, else `-` what the one and `+` what the other did."""
    from skyfleet.analysis.before_after import action_text

    print(f"- {names[0]}\n+ {names[1]}\n")
    for one, other in rows:
        if one and other and action_text(one.action) == action_text(other.action):
            _print_turn("=", one)
        else:
            _print_turn("-", one)
            _print_turn("+", other)


def _print_turn(sign: str, turn: Turn | None) -> None:
    from skyfleet.analysis.before_after import action_text

    if turn is None:
        return
    said = [action_text(turn.action), *(f"  {reply.text}" for reply in turn.replies)]
    # What a model wrote may hold control characters, which a terminal would obey.
    for line in "\n".join(said).splitlines():
        print(f"{sign} {''.join(c if c.isprintable() else repr(c)[1:-1] for c in line)}")


def _show_task(key: str, before: Sequence[Trajectory], after: Sequence[Trajectory]) -> None:
    from skyfleet.analysis.before_after import aligned, first_divergence

    one = next((trajectory for trajectory in before if trajectory.task_key == key), None)
    other = next((trajectory for trajectory in after if trajectory.task_key == key), None)
    if one is None or other is None:
        shown = ", ".join(sorted({t.task_key for t in before} & {t.task_key for t in after})[:3])
        raise ConfigError(f"--task {key}: not played before and after; played are {shown}, …")
    at = first_divergence(one, other)
    print("The actions are the same." if at is None else f"The actions differ from turn {at}.")
    print_rows(aligned(one, other), ("before", "after"))


def _episodes(
    entries: Sequence[Entry], set_name: str | None, step: int | None, *, last: bool
) -> list[Trajectory]:
    from skyfleet.analysis.reading import read_entries

    evals = [e for e in entries if e.kind == "eval" and set_name in (None, e.set_name)]
    steps = sorted({entry.step for entry in evals})
    if not steps or step not in (None, *steps):
        sets = sorted({entry.set_name for entry in entries if entry.kind == "eval"})
        raise ConfigError(f"--set {set_name} at step {step}: there are sets {sets}, steps {steps}")
    chosen = step if step is not None else steps[-1 if last else 0]
    return [t for _, t in read_entries(e for e in evals if e.step == chosen)]
