"""Listing: a run's episodes as they are now; only files that changed are read again."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from time import monotonic

from skyfleet.trajectories.archive import SUFFIX
from skyfleet.trajectories.entry import Entry, index_path
from skyfleet.trajectories.index import entries_of
from skyfleet.trajectories.records import RecordError

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
"""How often the folder is looked at, however often one asks."""
_SNAPSHOTS_KEPT = 4

Sizes = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class Snapshot:
    """What the run held at one look. Compared by identity, so that it can key a cache."""

    revision: int
    files: Mapping[str, list[Entry]]
    """By the place its episodes' ids begin with, such as `eval/val/40`."""

    @cached_property
    def entries(self) -> list[Entry]:
        return list(chain.from_iterable(self.files.values()))

    def find(self, entry_id: str) -> Entry:
        place, _, number = entry_id.rpartition("/")
        entries = self.files.get(place, [])
        if not number.isdecimal() or int(number) >= len(entries):
            raise RecordError(
                f"{entry_id!r}: the run holds no such episode; give one like train/1/0"
            )
        return entries[int(number)]


class Listing:
    """The episodes below a run's `trajectories` folder, also while it grows."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, tuple[Sizes, list[Entry]]] = {}
        self._looking = threading.Lock()
        self._looked_at = -_LOOK_SECONDS
        self._snapshots = deque([Snapshot(revision=0, files={})], maxlen=_SNAPSHOTS_KEPT)

    def now(self) -> Snapshot:
        """The newest look, at most a second old."""
        with self._looking:
            if monotonic() - self._looked_at >= _LOOK_SECONDS:
                self._look()
                self._looked_at = monotonic()
            return self._snapshots[-1]

    def at(self, revision: int) -> Snapshot:
        """A look that a reader is still paging through; the newest when it is long gone."""
        held = {snapshot.revision: snapshot for snapshot in list(self._snapshots)}
        return held.get(revision) or self.now()

    def _look(self) -> None:
        paths = sorted(self._folder.glob(f"train/*{SUFFIX}"))
        paths += sorted(self._folder.glob(f"eval/*/*{SUFFIX}"))
        read = {path: self._entries(path) for path in paths}
        if read != self._read:
            self._read = read
            files = {e[0].id.rpartition("/")[0]: e for _, e in read.values() if e}
            self._snapshots.append(Snapshot(self._snapshots[-1].revision + 1, files))

    def _entries(self, path: Path) -> tuple[Sizes, list[Entry]]:
        sizes = _sizes(path)
        known = self._read.get(path)
        if known and known[0] == sizes:
            return known
        try:
            return sizes, entries_of(path)
        except RecordError as error:  # the other files can still be read
            logger.warning("%s is left out: %s", path, error)
            return sizes, []


def _sizes(path: Path) -> Sizes:
    """What changes whenever a file's episodes do."""
    index = index_path(path)
    data = path.stat()
    return data.st_size, data.st_mtime_ns, index.stat().st_size if index.exists() else 0
