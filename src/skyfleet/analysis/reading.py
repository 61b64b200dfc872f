"""Reading: the episodes behind many entries, each file unpacked once and none kept."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby

from skyfleet.trajectories.archive import read_trajectories
from skyfleet.trajectories.entry import Entry, index_path
from skyfleet.trajectories.records import RecordError
from skyfleet.trajectories.trajectory import Trajectory

OnDamage = Callable[[RecordError], None]

logger = logging.getLogger(__name__)


def read_entries(
    entries: Iterable[Entry], *, on_damage: OnDamage | None = None
) -> Iterator[tuple[Entry, Trajectory]]:
    """In the order given, where the entries of a file stand together in the file's order.

    A file that is damaged or ends before an entry is a RecordError; with `on_damage` it is told,
    and left for the next.
    """
    for path, of_path in groupby(entries, key=lambda entry: entry.path):
        wanted = {entry.number: entry for entry in of_path}
        try:
            for number, trajectory in enumerate(read_trajectories(path)):
                if (entry := wanted.pop(number, None)) is not None:
                    yield entry, trajectory
                if not wanted:
                    break
            if wanted:
                raise RecordError(
                    f"{path} ends before {next(iter(wanted.values())).id} and has lost "
                    f"{len(wanted)} of its episodes; copy the file again, or remove "
                    f"{index_path(path).name} to do without them"
                )
        except RecordError as error:
            if on_damage is None:
                raise
            on_damage(error)


def warn(error: RecordError) -> None:
    """For `on_damage`, where no place of its own says what was left out."""
    logger.warning("left out: %s", error)
