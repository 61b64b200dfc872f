"""Failure shifts: why evaluation episodes were lost, before and after."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from skyfleet.analysis.failures import FailureClass, classify
from skyfleet.analysis.html.bars import shift_cell
from skyfleet.analysis.html.blocks import columns, command, fold, grid, note, section, table
from skyfleet.analysis.html.markup import Child, Html, join, tag
from skyfleet.analysis.html.shown_run import ShownRun, place_in_viewer
from skyfleet.analysis.html.wording import percent, points
from skyfleet.trajectories.archive import read_trajectories
from skyfleet.trajectories.entry import Entry

_PASSED = "passed"
_ORDER = (_PASSED, *map(str, FailureClass))


@dataclass(frozen=True, slots=True, kw_only=True)
class Classes:
    """How the episodes of one set at one step ended."""

    step: int
    shares: dict[str, float]
    """By class; what passed is among them."""
    examples: dict[str, str]
    """The first episode's id, by class."""


def failure_section(runs: Sequence[ShownRun]) -> Html:
    found = [(run, _ends_of_sets(run)) for run in runs if run.evaluation]
    if not found:
        return section("failures", "Failures", note("No evaluation episode was recorded."))
    shifts = [
        shift for _, sets in found for ends in sets.values() for shift in _shifts(ends).values()
    ]
    reach = max(map(abs, shifts), default=0.0)
    return section(
        "failures",
        "Failures",
        note("Share of a set's episodes by how they ended, at its first and its last evaluation."),
        [grid(_cards(run, sets, reach), span=6) for run, sets in found],
    )


def _ends_of_sets(run: ShownRun) -> dict[str, list[Classes]]:
    """Each set's first and last evaluation; a single one is both."""
    files: dict[str, dict[int, list[Entry]]] = defaultdict(lambda: defaultdict(list))
    for entry in run.evaluation:
        files[entry.set_name][entry.step].append(entry)
    return {
        name: [_classes(by_step[step]) for step in sorted({min(by_step), max(by_step)})]
        for name, by_step in files.items()
    }


def _cards(run: ShownRun, sets: Mapping[str, Sequence[Classes]], reach: float) -> Iterator[Html]:
    for name, ends in sets.items():
        title = f"{run.title}: {name}" if run.mark else name
        yield join(_table(title, ends, reach), _examples(run, ends[-1]))


def _classes(entries: Sequence[Entry]) -> Classes:
    """The entries are all of one file."""
    # Not strict: a run that goes on may have written more since its index was read.
    episodes = zip(entries, read_trajectories(entries[0].path), strict=False)
    seen = [(entry.id, str(classify(episode) or _PASSED)) for entry, episode in episodes]
    counts = Counter(name for _, name in seen)
    return Classes(
        step=entries[0].step,
        shares={name: n / len(seen) for name, n in counts.items()},
        examples={name: entry_id for entry_id, name in reversed(seen)},
    )


def _shifts(ends: Sequence[Classes]) -> dict[str, float]:
    """By every class that was seen, in the order of tables."""
    before, after = ends[0].shares, ends[-1].shares
    names = [name for name in _ORDER if name in before or name in after]
    return {name: after.get(name, 0.0) - before.get(name, 0.0) for name in names}


def _table(title: str, ends: Sequence[Classes], reach: float) -> Html:
    shifts = _shifts(ends)
    rows: list[list[Child]] = [
        [name, *(percent(end.shares.get(name, 0.0)) for end in ends)] for name in shifts
    ]
    steps = [f"Step {end.step}" for end in ends]
    if len(ends) == 1:
        return table(title, columns("Ending", *steps, text=("Ending",)), rows)
    for row, shift in zip(rows, shifts.values(), strict=True):
        row += [points(shift), shift_cell(shift, reach=reach)]
    head = columns("Ending", *steps, "Points", "", text=("Ending",), draw=("",))
    return table(title, head, rows)


def _examples(run: ShownRun, classes: Classes) -> Html:
    items = [
        tag("li", f"{name}: ", command(place_in_viewer(entry_id)))
        for name in _ORDER
        if (entry_id := classes.examples.get(name))
    ]
    return fold(
        f"One of each, step {classes.step}",
        note("Behind the address that ", command(run.view_command), " prints:"),
        tag("ul", items, class_="plain"),
    )
