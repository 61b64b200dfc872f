"""Searching: the archive read for a text in a thread of its own; finds can be seen meanwhile."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

from skyfleet.analysis.viewer.listing import Snapshot
from skyfleet.analysis.viewer.passages import where_said
from skyfleet.analysis.viewer.query import Query, chosen
from skyfleet.trajectories.archive import load
from skyfleet.trajectories.entry import Entry
from skyfleet.trajectories.index import search

logger = logging.getLogger(__name__)

FINDS_AT_MOST = 2_000
"""Of one search: whoever gets more will narrow it."""
_SEARCHES_KEPT = 4


class Search:
    """One text, looked for among the given entries."""

    def __init__(self, entries: Sequence[Entry], text: str) -> None:
        self.total = len(entries)
        self.seen = 0
        """Entries whose file has been opened."""
        self.finds: dict[Entry, str] = {}
        """Each with the passage that says it."""
        self.error = ""
        self._stop = threading.Event()
        # One file's episodes together, as `search` wants them; the newest files first.
        self._entries = sorted(entries, key=lambda e: (-e.step, e.path, e.number))
        self._text = text
        self._thread = threading.Thread(target=self._run, name="search", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    @property
    def full(self) -> bool:
        return len(self.finds) >= FINDS_AT_MOST

    def stop(self) -> None:
        self._stop.set()

    def join(self, timeout_seconds: float) -> None:
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        try:
            for entry in search(self._counted(), self._text):
                passage = where_said(load(entry), self._text)
                if passage is not None:
                    self.finds[entry] = passage
                if self.full or self._stop.is_set():
                    return
        except Exception as error:
            logger.warning("the search for %r ended early: %s", self._text, error)
            self.error = str(error)

    def _counted(self) -> Iterator[Entry]:
        for entry in self._entries:
            if self._stop.is_set():
                return
            self.seen += 1
            yield entry


class Searches:
    """The latest few searches; beginning another stops the oldest."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, Query, str], Search] = {}
        self._lock = threading.Lock()

    def get(self, snapshot: Snapshot, query: Query, text: str) -> Search:
        with self._lock:
            query = replace(query, sort="newest")  # another order is no other search
            key = (snapshot.revision, query, text)
            found = self._held.get(key)
            if found is None:
                found = self._held[key] = Search(chosen(snapshot, query), text)
                while len(self._held) > _SEARCHES_KEPT:
                    self._held.pop(next(iter(self._held))).stop()
            return found

    def close(self) -> None:
        with self._lock:
            for one in self._held.values():
                one.stop()
                one.join(timeout_seconds=5)
