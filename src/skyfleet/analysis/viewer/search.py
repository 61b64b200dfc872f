"""Searching: the archive read for a text in a thread of its own; finds can be seen meanwhile."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from skyfleet.analysis.viewer.listing import Query, Snapshot, chosen
from skyfleet.chat.message import Message
from skyfleet.trajectories.archive import load
from skyfleet.trajectories.entry import Entry
from skyfleet.trajectories.index import search
from skyfleet.trajectories.trajectory import Trajectory

_BEFORE, _AFTER = 40, 120
"""Characters shown around a place."""


def where_said(trajectory: Trajectory, text: str) -> str | None:
    """The first passage that says `text`, with a few words around it; None where none does.

    Token ids, logprobs and pictures are not read: an archive's search finds texts in those too.
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
    for message in trajectory.opening:
        yield from _said(message)
    for turn in trajectory.turns:
        for message in (turn.action, *turn.replies):
            yield from _said(message)
    if trajectory.grade:
        yield trajectory.grade.explanation
    if trajectory.failure:
        yield trajectory.failure.kind
        yield trajectory.failure.detail


def _said(message: Message) -> Iterator[str]:
    yield message.text
    yield message.reasoning or ""
    for call in message.tool_calls:
        yield call.name
        yield from _leaves(call.arguments)
    yield from message.malformed_calls


def _leaves(value: Any) -> Iterator[str]:
    """Names and values of arguments, however deep."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield str(name)
            yield from _leaves(inner)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield str(value)


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
