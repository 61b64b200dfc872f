"""Read-only database states with cached reads, and a fast test of which tables differ."""

from __future__ import annotations

import sqlite3
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

MAX_STATES = 256
_HEADER_BYTES = 100
"""The start of the first page, which holds no row."""
_SCHEMA = ""
"""Stands in for a table name on pages that describe the tables."""


class FrozenState(sqlite3.Connection):
    """A database that cannot change; it caches what was read from it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cache: dict[object, Any] = {}


_states: OrderedDict[bytes, FrozenState] = OrderedDict()


def load_frozen_state(image: bytes) -> FrozenState:
    """Open an image read-only; every caller with the same image shares one connection.

    An LRU cache of `MAX_STATES` images closes the ones that fall out.
    """
    if image not in _states:
        _states[image] = _open_frozen(image)
    _states.move_to_end(image)
    if len(_states) > MAX_STATES:
        _, oldest = _states.popitem(last=False)
        oldest.close()
    return _states[image]


def _open_frozen(image: bytes) -> FrozenState:
    state = sqlite3.connect(
        ":memory:", isolation_level=None, check_same_thread=False, factory=FrozenState
    )
    state.deserialize(image)
    state.execute("pragma query_only = on")
    return state


def read_cached(
    connection: sqlite3.Connection, read: Callable[[sqlite3.Connection, str], T], argument: str
) -> T:
    """Return `read(connection, argument)`; on a frozen state it runs once."""
    if not isinstance(connection, FrozenState):
        return read(connection, argument)
    key = (read, argument)
    if key not in connection.cache:
        connection.cache[key] = read(connection, argument)
    result: T = connection.cache[key]
    return result


def find_touched_tables(before: sqlite3.Connection, after: sqlite3.Connection) -> set[str] | None:
    """Return the tables that may have changed; no other table has. None: the pages do not show it.

    SQLite stores each table in pages of its own. A changed row changes its page, and a new page
    hangs on an old one, so a table with identical pages has not changed. A virtual table (full
    text, R-tree) has no pages: any write may be its own.
    """
    if before.in_transaction or after.in_transaction:
        return None  # an uncommitted change may not be in its page yet
    old, new = _serialize(before), _serialize(after)
    pages = read_cached(before, _list_pages, "dbstat")
    touched = {table for start, end, table in pages if old[start:end] != new[start:end]}
    # With another schema, tables may have been added, dropped or moved.
    return touched if pages and _SCHEMA not in touched else None


def _serialize(state: sqlite3.Connection) -> bytes:
    try:
        return state.serialize()
    except sqlite3.OperationalError:
        return b""  # nothing was ever written to it


def _list_pages(state: sqlite3.Connection, catalogue: str) -> list[tuple[int, int, str]]:
    """Return start, end and table of every page; empty if SQLite was built without dbstat."""
    query = (
        f"select max(pgoffset, {_HEADER_BYTES}), pgoffset + pgsize, coalesce(tbl_name, '{_SCHEMA}')"
        f" from {catalogue} left join sqlite_master using (name)"
        f" union all select 0, {sys.maxsize}, name"
        " from sqlite_master where type = 'table' and rootpage = 0"
    )
    try:
        return state.execute(query).fetchall()
    except sqlite3.OperationalError:
        return []
