"""Reading: the episodes behind many entries, each file unpacked once and none kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby

from skyfleet.trajectories.archive import read_trajectories
from skyfleet.trajectories.entry import Entry
from skyfleet.trajectories.records import RecordError
from skyfleet.trajectories.trajectory import Trajectory

OnDamage = Callable[[RecordError], None]


def read_entries(
    entries: Iterable[Entry], *, on_damage: OnDamage | None = None
) -> Iterator[tuple[Entry, Trajectory]]:
    """In the order given, where the entries of a file stand together in the file's order.

    With `on_damage` a file that cannot be read on is told, and left for the next.
    """
    for path, of_path in groupby(entries, key=lambda entry: entry.path):
        wanted = {entry.number: entry for entry in of_path}
        try:
            for number, trajectory in enumerate(read_trajectories(path)):
                if (entry := wanted.pop(number, None)) is not None:
                    yield entry, trajectory
                if not wanted:
                    break
        except RecordError as error:
            if on_damage is None:
                raise
            on_damage(error)
