"""Pages: which tables of two states are the same to the byte, so that their rows need not be read.

SQLite keeps each table in pages of its own. A row that changes changes its page; a page that a
table gains hangs on one it had. So a table none of whose pages differ has not changed.
"""

from __future__ import annotations

import sqlite3

from skyfleet.envs.verifiers.frozen import FrozenState, remembered

_HEADER = 100
"""Bytes at the start of the first page that count writes and hold no row."""


def unchanged_tables(before: sqlite3.Connection, after: sqlite3.Connection) -> frozenset[str]:
    """Tables that are surely the same; of all others this says nothing."""
    if not isinstance(before, FrozenState):
        return frozenset()
    owners = remembered(before, _owners, "dbstat")
    old, new = memoryview(before.image), memoryview(after.serialize())
    size = int.from_bytes(old[16:18], "big")
    if not owners or old[16:18] != new[16:18] or old[_HEADER:size] != new[_HEADER:size]:
        return frozenset()  # another schema: tables may have changed places
    touched = {
        owner
        for page, owner in owners.items()
        if old[page * size : (page + 1) * size] != new[page * size : (page + 1) * size]
    }
    return frozenset(owners.values()) - touched


def _owners(state: sqlite3.Connection, catalogue: str) -> dict[int, str]:
    """Page, from 0 -> the table it belongs to; nothing where SQLite was built without dbstat."""
    if state.execute("pragma auto_vacuum").fetchone() != (0,):
        return {}  # pages move
    query = (
        f"select pageno - 1, tbl_name from {catalogue} join sqlite_master using (name)"
        " where pageno > 1"
    )
    try:
        return dict(state.execute(query).fetchall())
    except sqlite3.OperationalError:
        return {}
