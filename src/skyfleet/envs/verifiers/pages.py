"""Pages: which tables of two states may differ, so that the rows of all others need not be read.

SQLite keeps each table in pages of its own. A row that changes changes its page; a page that a
table gains hangs on one it had. So a table none of whose pages differ has not changed. A virtual
table (full text, R-Tree) has no page: whatever is written may be its.
"""

from __future__ import annotations

import sqlite3
import sys

from skyfleet.envs.verifiers.frozen import remembered

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
