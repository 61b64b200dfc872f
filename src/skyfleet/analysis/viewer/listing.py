"""Listing: a run's episodes as they are now; only files that changed are read again."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any, Literal, get_args

from skyfleet.errors import SkyfleetError
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


Outcome = Literal["passed", "failed", "unknown"]

ORDERS: Mapping[str, tuple[Callable[[Entry], Any], bool]] = {
    "newest": (lambda entry: entry.step, True),
    "oldest": (lambda entry: entry.step, False),
    "task": (lambda entry: (entry.env_key, entry.task_key, entry.step, entry.sample), False),
    "reward": (lambda entry: -inf if entry.reward is None else entry.reward, True),
    "turns": (lambda entry: entry.turns, True),
    "errors": (lambda entry: entry.tool_errors + entry.malformed_calls, True),
    "tokens": (lambda entry: entry.sampled_tokens, True),
    "seconds": (lambda entry: entry.seconds, True),
}
"""What each looks at, and whether the most comes first."""


class QueryError(SkyfleetError, ValueError):
    """An address asks for something that is not there to be asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """An empty field asks for everything."""

    env: str = ""
    outcome: str = ""
    kind: str = ""
    set_name: str = ""
    step: int | None = None
    sort: str = "newest"

    @classmethod
    def of(cls, params: Mapping[str, str]) -> Query:
        """From an address: `Query.of({"env": "github", "step": "40"})`."""
        return cls(
            env=params.get("env", ""),
            outcome=_one_of(params, "outcome", ("", *get_args(Outcome))),
            kind=_one_of(params, "kind", ("", "train", "eval")),
            set_name=params.get("set", ""),
            step=whole_number(params, "step"),
            sort=_one_of(params, "sort", tuple(ORDERS)) or "newest",
        )

    def holds(self, entry: Entry) -> bool:
        return (
            (not self.env or entry.env_key == self.env)
            and (not self.outcome or outcome_of(entry.success) == self.outcome)
            and (not self.kind or entry.kind == self.kind)
            and (not self.set_name or entry.set_name == self.set_name)
            and (self.step is None or entry.step == self.step)
        )


def outcome_of(success: bool | None) -> Outcome:
    if success is None:
        return "unknown"
    return "passed" if success else "failed"


@lru_cache(maxsize=16)
def chosen(snapshot: Snapshot, query: Query) -> list[Entry]:
    """The entries asked for, in order; the same list again for every page of it."""
    return ordered(filter(query.holds, snapshot.entries), query.sort)


def ordered(entries: Iterable[Entry], sort: str) -> list[Entry]:
    measure, most_first = ORDERS[sort]
    return sorted(entries, key=measure, reverse=most_first)


def whole_number(params: Mapping[str, str], key: str) -> int | None:
    """None where it is not given."""
    text = params.get(key, "")
    if not text:
        return None
    if not (text.isascii() and text.isdecimal()) or len(text) > 9:
        raise QueryError(f"{key}={text!r}; give a whole number such as 40")
    return int(text)


def _one_of(params: Mapping[str, str], key: str, known: tuple[str, ...]) -> str:
    text = params.get(key, "")
    if text and text not in known:
        raise QueryError(f"{key}={text!r}; choose from {[name for name in known if name]}")
    return text
