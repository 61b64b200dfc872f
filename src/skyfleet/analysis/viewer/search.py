"""Full-text search over episodes in a background thread, with intermediate results."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from skyfleet.analysis.viewer.listing import Query, Snapshot, select_entries
from skyfleet.chat.message import Message
from skyfleet.trajectories.archive import load
from skyfleet.trajectories.entry import Entry
from skyfleet.trajectories.index import search
from skyfleet.trajectories.trajectory import Trajectory

logger = logging.getLogger(__name__)

_BEFORE, _AFTER = 40, 120
"""Characters shown around a match."""
MAX_FINDS = 2_000
"""The limit of one search."""
_MAX_SEARCHES = 4


def find_passage(trajectory: Trajectory, text: str) -> str | None:
    """The first passage that contains `text`, with some context; None if there is none.

    Ignores token ids, logprobs and images, in which a search of the archive also matches.
    """
    wanted = text.lower()
    for passage in _passages(trajectory):
        at = passage.lower().find(wanted)
        if at >= 0:
            start, stop = max(0, at - _BEFORE), at + len(text) + _AFTER
            cut = " ".join(passage[start:stop].split())
            return ("…" if start else "") + cut + ("…" if stop < len(passage) else "")
    return None


def _passages(trajectory: Trajectory) -> Iterator[str]:
    yield trajectory.task_key
    yield trajectory.env_key
    for message in trajectory.prompt:
        yield from _message_texts(message)
    for turn in trajectory.turns:
        for message in (turn.action, *turn.replies):
            yield from _message_texts(message)
    if trajectory.grade:
        yield trajectory.grade.explanation
    if trajectory.failure:
        yield trajectory.failure.kind
        yield trajectory.failure.detail


def _message_texts(message: Message) -> Iterator[str]:
    yield message.text
    yield message.reasoning or ""
    for call in message.tool_calls:
        yield call.name
        yield from _leaves(call.arguments)
    yield from message.malformed_calls


def _leaves(value: Any) -> Iterator[str]:
    """The names and values of arguments at any depth."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield str(name)
            yield from _leaves(inner)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield str(value)


class Search:
    """The search for one text in the given entries."""

    def __init__(self, entries: Sequence[Entry], text: str) -> None:
        self.total = len(entries)
        self.seen = 0
        """The number of entries searched so far."""
        self.finds: dict[Entry, str] = {}
        """Each match with its passage."""
        self.error = ""
        self._stop = threading.Event()
        # Episodes of one file are adjacent, as `search` requires; newest files first.
        self._entries = sorted(entries, key=lambda e: (-e.step, e.path, e.number))
        self._text = text
        self._thread = threading.Thread(target=self._run, name="search", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    @property
    def full(self) -> bool:
        return len(self.finds) >= MAX_FINDS

    def stop(self) -> None:
        self._stop.set()

    def join(self, timeout_seconds: float) -> None:
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        try:
            for entry in search(self._count_searched(), self._text):
                passage = find_passage(load(entry), self._text)
                if passage is not None:
                    self.finds[entry] = passage
                if self.full or self._stop.is_set():
                    return
        except Exception as error:
            logger.warning("the search for %r stopped early: %s", self._text, error)
            self.error = str(error)

    def _count_searched(self) -> Iterator[Entry]:
        for entry in self._entries:
            if self._stop.is_set():
                return
            self.seen += 1
            yield entry


class Searches:
    """A cache of the latest searches; starting another one stops the oldest."""

    def __init__(self) -> None:
        self._searches: dict[tuple[int, Query, str], Search] = {}
        self._lock = threading.Lock()

    def get(self, snapshot: Snapshot, query: Query, text: str) -> Search:
        with self._lock:
            query = replace(query, sort="newest")  # the sort order does not affect the search
            key = (snapshot.revision, query, text)
            found = self._searches.get(key)
            if found is None:
                found = self._searches[key] = Search(select_entries(snapshot, query), text)
                while len(self._searches) > _MAX_SEARCHES:
                    self._searches.pop(next(iter(self._searches))).stop()
            return found

    def close(self) -> None:
        with self._lock:
            for one in self._searches.values():
                one.stop()
                one.join(timeout_seconds=5)
