"""Read-only database states with cached reads, and a fast test of which tables differ."""

from __future__ import annotations

import sqlite3
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class FrozenState(sqlite3.Connection):
    """Remembers answers as long as it lives."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.known: dict[object, Any] = {}


MOST_STATES = 256
_states: OrderedDict[bytes, FrozenState] = OrderedDict()


def frozen_state(image: bytes) -> FrozenState:
    """The state of an image: the same one for everybody who asks.

    It is closed once so many others were asked for since.
    """
    if image not in _states:
        _states[image] = _frozen(image)
    _states.move_to_end(image)
    if len(_states) > MOST_STATES:
        _, oldest = _states.popitem(last=False)
        oldest.close()
    return _states[image]


def _frozen(image: bytes) -> FrozenState:
    state = sqlite3.connect(
        ":memory:", isolation_level=None, check_same_thread=False, factory=FrozenState
    )
    state.deserialize(image)
    state.execute("pragma query_only = on")
    return state


def remembered(
    connection: sqlite3.Connection, ask: Callable[[sqlite3.Connection, str], T], about: str
) -> T:
    """What `ask(connection, about)` says; of a frozen state it is asked once."""
    if not isinstance(connection, FrozenState):
        return ask(connection, about)
    key = (ask, about)
    if key not in connection.known:
        connection.known[key] = ask(connection, about)
    answer: T = connection.known[key]
    return answer


_HEADER = 100
"""Bytes at the start of the first page that hold no row."""
_SCHEMA = ""
"""In place of a table, for the pages that describe the tables."""


def touched_tables(before: sqlite3.Connection, after: sqlite3.Connection) -> set[str] | None:
    """Tables that may have changed; none besides has. None: pages do not tell."""
    if before.in_transaction or after.in_transaction:
        return None  # what is not committed need not be in its page
    old, new = _image(before), _image(after)
    pages = remembered(before, _pages, "dbstat")
    touched = {table for start, end, table in pages if old[start:end] != new[start:end]}
    # Where the schema is another one, tables may have come, gone or changed places.
    return touched if pages and _SCHEMA not in touched else None


def _image(state: sqlite3.Connection) -> bytes:
    try:
        return state.serialize()
    except sqlite3.OperationalError:
        return b""  # nothing was ever written to it


def _pages(state: sqlite3.Connection, catalogue: str) -> list[tuple[int, int, str]]:
    """Start, end and table of every page; none where SQLite has no dbstat."""
    query = (
        f"select max(pgoffset, {_HEADER}), pgoffset + pgsize, coalesce(tbl_name, '{_SCHEMA}')"
        f" from {catalogue} left join sqlite_master using (name)"
        f" union all select 0, {sys.maxsize}, name"
        " from sqlite_master where type = 'table' and rootpage = 0"
    )
    try:
        return state.execute(query).fetchall()
    except sqlite3.OperationalError:
        return []
