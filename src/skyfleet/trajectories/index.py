"""List the episodes of an archive and search their records for a text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from skyfleet.trajectories.archive import SUFFIX, members
from skyfleet.trajectories.entry import COLUMNS, Entry, Kind, index_path, index_values
from skyfleet.trajectories.records import RecordError, from_record
from skyfleet.trajectories.trajectory import Ending


def list_entries(
    folder: Path, *, on_damage: Callable[[RecordError], None] | None = None
) -> list[Entry]:
    """List every episode below a run's `trajectories` folder: training first, each in step order.

    With `on_damage`, a file that cannot be read is reported to it and skipped.
    """
    entries: list[Entry] = []
    for path in _list_files(folder):
        try:
            entries += list_file_entries(path)
        except RecordError as error:
            if on_damage is None:
                raise
            on_damage(error)
    return entries


def list_file_entries(path: Path) -> list[Entry]:
    """List the episodes of one file; without its index, the file itself is scanned."""
    index = index_path(path)
    rows = _read_index(index) if index.exists() else _scan(path)
    kind, set_name, step = _parse_path(path)
    return [
        Entry(
            path=path,
            number=number,
            kind=kind,
            set_name=set_name,
            step=step,
            **row,
        )
        for number, row in enumerate(rows)
    ]


def find_entry(folder: Path, entry_id: str) -> Entry:
    """Find the episode with an id such as `eval/unseen_tasks/40/3`."""
    *place, step, number = entry_id.split("/") if entry_id.count("/") >= 2 else ("", "", "")
    path = folder.joinpath(*place, f"step_{int(step):06d}{SUFFIX}") if step.isdecimal() else folder
    entries = list_file_entries(path) if path.is_file() else []
    if not number.isdecimal() or int(number) >= len(entries):
        raise RecordError(f"{entry_id!r}: {folder} has no such episode; {_suggest_ids(folder)}")
    return entries[int(number)]


def _suggest_ids(folder: Path) -> str:
    """Suggest an id of training and of every set, each of its last step that has an episode."""
    last_by_folder: dict[Path, tuple[Kind, str, int]] = {}
    for path in reversed(_list_files(folder)):
        if path.parent not in last_by_folder and _has_entries(path):
            last_by_folder[path.parent] = _parse_path(path)
    places = reversed(last_by_folder.values())
    ids = ["/".join(filter(None, (*place, str(step), "0"))) for *place, step in places]
    return f"use one like {', '.join(ids)}" if ids else "the folder has no episodes"


def _has_entries(path: Path) -> bool:
    try:
        return bool(list_file_entries(path))
    except RecordError:
        return False


def _list_files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"train/*{SUFFIX}")) + sorted(folder.glob(f"eval/*/*{SUFFIX}"))


def search(entries: Iterable[Entry], text: str) -> Iterator[Entry]:
    """Yield the entries whose record contains `text`, in the order given, ignoring ASCII case."""
    # Records are ASCII JSON, so the text is searched in its escaped form.
    wanted = json.dumps(text)[1:-1].encode("ascii").lower()
    for path, of_path in groupby(entries, key=lambda entry: entry.path):
        by_offset: dict[int, list[Entry]] = {}
        for entry in of_path:
            by_offset.setdefault(entry.offset, []).append(entry)
        for offset, member in members(path):
            if (here := by_offset.get(offset)) and wanted in (lowered := member.lower()):
                lines = lowered.splitlines()
                yield from (entry for entry in here if wanted in lines[entry.line])


def _parse_path(path: Path) -> tuple[Kind, str, int]:
    step = path.name.removesuffix(SUFFIX).removeprefix("step_")
    number = int(step) if step.isdecimal() else 0
    return (
        ("train", "", number) if path.parent.name == "train" else ("eval", path.parent.name, number)
    )


def _read_index(index: Path) -> Iterator[dict[str, Any]]:
    """Also yields episodes that a truncated file has lost: loading them reports it."""
    # Other bytes become an escape that JSON does not know, so the error below names the line.
    with index.open(encoding="ascii", errors="backslashreplace") as lines:
        columns: list[str] = list(COLUMNS)
        for number, line in enumerate(lines, start=1):
            if not line.endswith("\n"):
                return  # still being written
            try:
                values = json.loads(line)
                if number == 1:
                    columns = _parse_columns(values)
                else:
                    yield _parse_row(columns, values)
            except (TypeError, ValueError) as error:
                raise RecordError(
                    f"{index} line {number}: {error}; "
                    "delete the index, and the episodes are read without it"
                ) from None


def _parse_columns(header: Any) -> list[str]:
    if set(header) != set(COLUMNS):
        raise ValueError(f"the columns are {header}, not those of {list(COLUMNS)}")
    return list(header)


def _parse_row(columns: Iterable[str], values: Iterable[Any]) -> dict[str, Any]:
    row = dict(zip(columns, values, strict=True))
    return {**row, "ending": Ending(row["ending"])}


def _scan(path: Path) -> Iterator[dict[str, Any]]:
    for offset, member in members(path):
        for number, line in enumerate(member.splitlines()):
            try:
                values = index_values(from_record(json.loads(line)))
            except ValueError as error:
                raise RecordError(
                    f"{path} at byte {offset}, line {number + 1}: {error}; copy the file again"
                ) from None
            yield _parse_row(COLUMNS, [*values, offset, number])
