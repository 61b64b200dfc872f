"""Reading: the episodes behind many entries, each file unpacked once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from skyfleet.trajectories.archive import read_trajectories
from skyfleet.trajectories.entry import Entry
from skyfleet.trajectories.trajectory import Trajectory


def read_entries(entries: Iterable[Entry]) -> Iterator[tuple[Entry, Trajectory]]:
    """In the order given, where the entries of a file stand together in the file's order."""
    for path, of_path in groupby(entries, key=lambda entry: entry.path):
        wanted = {entry.number: entry for entry in of_path}
        for number, trajectory in enumerate(read_trajectories(path)):
            if (entry := wanted.pop(number, None)) is not None:
                yield entry, trajectory
            if not wanted:
                break
