"""The list of episodes: snapshots of a growing run, filters and sort orders."""

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
from skyfleet.trajectories.index import list_file_entries
from skyfleet.trajectories.records import RecordError

logger = logging.getLogger(__name__)

_REFRESH_SECONDS = 1.0
"""The minimum time between two scans of the folder."""
_MAX_SNAPSHOTS = 4
Sizes = tuple[int, int, int]
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
"""The sort key of each order, and whether it is descending."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The episodes at one scan. Compared by identity, so that it can be a cache key."""

    revision: int
    files: Mapping[str, list[Entry]]
    """By the prefix of the episode ids, such as `eval/val/40`."""

    @cached_property
    def entries(self) -> list[Entry]:
        return list(chain.from_iterable(self.files.values()))

    def find(self, entry_id: str) -> Entry:
        prefix, _, number = entry_id.rpartition("/")
        entries = self.files.get(prefix, [])
        if not number.isdecimal() or int(number) >= len(entries):
            raise RecordError(
                f"{entry_id!r}: the run has no such episode; use an id such as train/1/0"
            )
        return entries[int(number)]


class Listing:
    """The episodes in a `trajectories` folder; rescans only files that changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, tuple[Sizes, list[Entry]]] = {}
        self._lock = threading.Lock()
        self._refreshed_at = -_REFRESH_SECONDS
        self._snapshots = deque([Snapshot(revision=0, files={})], maxlen=_MAX_SNAPSHOTS)

    def now(self) -> Snapshot:
        """The latest snapshot, at most one second old."""
        with self._lock:
            if monotonic() - self._refreshed_at >= _REFRESH_SECONDS:
                self._refresh()
                self._refreshed_at = monotonic()
            return self._snapshots[-1]

    def at(self, revision: int) -> Snapshot:
        """A snapshot that a reader is still paging through; the latest if it was discarded."""
        held = {snapshot.revision: snapshot for snapshot in list(self._snapshots)}
        return held.get(revision) or self.now()

    def _refresh(self) -> None:
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
            return sizes, list_file_entries(path)
        except RecordError as error:  # continue with the other files
            logger.warning("%s is skipped: %s", path, error)
            return sizes, []


def _sizes(path: Path) -> Sizes:
    """Sizes and times that change whenever the episodes of a file change."""
    index = index_path(path)
    data = path.stat()
    return data.st_size, data.st_mtime_ns, index.stat().st_size if index.exists() else 0


class QueryError(SkyfleetError, ValueError):
    """A request has an invalid filter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A filter; empty fields match everything."""

    env: str = ""
    outcome: str = ""
    kind: str = ""
    set_name: str = ""
    step: int | None = None
    sort: str = "newest"

    @classmethod
    def from_params(cls, params: Mapping[str, str]) -> Query:
        """From URL parameters such as `{"env": "github", "step": "40"}`."""
        return cls(
            env=params.get("env", ""),
            outcome=_parse_choice(params, "outcome", ("", *get_args(Outcome))),
            kind=_parse_choice(params, "kind", ("", "train", "eval")),
            set_name=params.get("set", ""),
            step=parse_int(params, "step"),
            sort=_parse_choice(params, "sort", tuple(ORDERS)) or "newest",
        )

    def matches(self, entry: Entry) -> bool:
        return (
            (not self.env or entry.env_key == self.env)
            and (not self.outcome or get_outcome(entry.success) == self.outcome)
            and (not self.kind or entry.kind == self.kind)
            and (not self.set_name or entry.set_name == self.set_name)
            and (self.step is None or entry.step == self.step)
        )


def get_outcome(success: bool | None) -> Outcome:
    if success is None:
        return "unknown"
    return "passed" if success else "failed"


@lru_cache(maxsize=16)
def select_entries(snapshot: Snapshot, query: Query) -> list[Entry]:
    """The matching entries in order; cached, so that all pages share one list."""
    return sort_entries(filter(query.matches, snapshot.entries), query.sort)


def sort_entries(entries: Iterable[Entry], sort: str) -> list[Entry]:
    key, descending = ORDERS[sort]
    return sorted(entries, key=key, reverse=descending)


def parse_int(params: Mapping[str, str], key: str) -> int | None:
    """None if the parameter is missing."""
    text = params.get(key, "")
    if not text:
        return None
    if not (text.isascii() and text.isdecimal()) or len(text) > 9:
        raise QueryError(f"{key}={text!r}; pass an integer such as 40")
    return int(text)


def _parse_choice(params: Mapping[str, str], key: str, known: tuple[str, ...]) -> str:
    text = params.get(key, "")
    if text and text not in known:
        raise QueryError(f"{key}={text!r}; choose from {[name for name in known if name]}")
    return text
