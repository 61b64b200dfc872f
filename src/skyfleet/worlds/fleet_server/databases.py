"""Describe, query and compare the seed and the current database of an instance."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from time import monotonic
from typing import Any

from pydantic import BaseModel, Field

from skyfleet.envs.verifiers.difference import Change, Difference, IgnoreConfig, table_names
from skyfleet.worlds.database import Database
from skyfleet.worlds.fleet_server.http import HttpError
from skyfleet.worlds.fleet_server.instances import Instance

RESOURCES = (
    {"name": "seed", "type": "sqlite", "mode": "ro"},
    {"name": "current", "type": "sqlite", "mode": "rw"},
)
_QUERY_SECONDS = 1.0
"""A query blocks every other client while it runs."""
_MAX_BYTES = 10_000_000
"""Limit of one value, and approximately of the characters of one response."""
_FORBIDDEN = (
    # These open files on this machine; VACUUM INTO attaches, so it is denied too.
    sqlite3.SQLITE_ATTACH,
    sqlite3.SQLITE_DETACH,
    # A transaction left open would hide later changes from the grade.
    sqlite3.SQLITE_TRANSACTION,
    sqlite3.SQLITE_SAVEPOINT,
)


class QueryRequest(BaseModel):
    query: str
    args: list[str | int | float | None] | None = None
    read_only: bool = True


class Ignored(BaseModel):
    tables: set[str] = Field(default_factory=set)
    fields: set[str] = Field(default_factory=set)
    table_fields: dict[str, set[str]] = Field(default_factory=dict)


class DiffRequest(BaseModel):
    ignore_config: Ignored = Ignored()


def describe(instance: Instance, name: str) -> dict[str, Any]:
    try:
        with _open(instance, name) as db, _bounded(db.connection):
            tables = [
                {"name": table, "sql": _sql(db, table), "columns": _columns(db, table)}
                for table in sorted(table_names(db.connection))
            ]
    except sqlite3.Error as error:
        return {"resource_name": name, **_error_response("the description", error)}
    return {"success": True, "resource_name": name, "tables": tables, "message": "ok"}


def query(instance: Instance, name: str, request: QueryRequest) -> dict[str, Any]:
    """Run one statement. An SQL error is part of the response, as in Fleet's API."""
    try:
        with _open(instance, name) as db:
            access = db.read_only() if request.read_only or name == "seed" else nullcontext()
            with _bounded(db.connection), access:
                cursor = db.connection.execute(request.query, request.args or ())
                rows = list(_read_rows(cursor))
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        return _error_response("the query", error)
    return {
        "success": True,
        "columns": [column[0] for column in cursor.description or ()],
        "rows": rows,
        "rows_affected": max(cursor.rowcount, 0),
        "last_insert_id": cursor.lastrowid,
        "message": "ok",
    }


def difference(instance: Instance, request: DiffRequest) -> dict[str, Any]:
    """List every changed row of every table, in the format that fleet-python validates."""
    ignored, after = request.ignore_config, instance.app.db
    try:
        with _open(instance, "seed") as before, _bounded(after.connection):
            changes = Difference(
                before.connection, after.connection, IgnoreConfig(**ignored.model_dump())
            ).changes
            tables = sorted(table_names(after.connection) - ignored.tables)
            diff = {
                table: _table_diff(table, [c for c in changes if c.table == table], before, after)
                for table in tables
            }
    except sqlite3.Error as error:
        return _error_response("the comparison", error)
    return {"success": True, "diff": diff, "message": "ok"}


def _read_rows(cursor: sqlite3.Cursor) -> Iterator[list[Any]]:
    size = 0
    for row in cursor:
        cells = [_cell(value) for value in row]
        size += sum(len(str(cell)) for cell in cells)
        if size > _MAX_BYTES:
            cursor.close()
            raise ValueError(f"the response exceeds {_MAX_BYTES:,} characters; select fewer rows")
        yield cells


def _error_response(what: str, error: Exception) -> dict[str, Any]:
    return {"success": False, "error": str(error), "message": f"{what} failed: {error}"}


@contextmanager
def _open(instance: Instance, name: str) -> Iterator[Database]:
    if name == "current":
        yield instance.app.db
    elif name == "seed":
        seed = Database(instance.world.image(instance.data_seed))
        try:
            yield seed
        finally:
            seed.close()
    else:
        raise HttpError(400, f"resource {name!r} is unknown; choose seed or current")


@contextmanager
def _bounded(connection: sqlite3.Connection) -> Iterator[None]:
    """Limit the time and the size of a statement, and deny access to files."""
    ends_at = monotonic() + _QUERY_SECONDS
    longest = connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_BYTES)
    connection.set_authorizer(
        lambda action, *_: sqlite3.SQLITE_DENY if action in _FORBIDDEN else sqlite3.SQLITE_OK
    )
    connection.set_progress_handler(lambda: monotonic() > ends_at, 10_000)
    try:
        yield
    finally:
        connection.set_progress_handler(None, 0)
        connection.set_authorizer(None)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, longest)


def _sql(db: Database, table: str) -> str:
    return str(db.column("select sql from sqlite_master where name = ?", table)[0])


def _columns(db: Database, table: str) -> list[dict[str, Any]]:
    return [
        {
            "name": column["name"],
            "type": column["type"],
            "notnull": bool(column["notnull"]),
            "default_value": column["dflt_value"],
            "primary_key": column["pk"] > 0,
            "pk": column["pk"],
        }
        for column in db.rows(f'pragma table_info("{table}")')
    ]


def _table_diff(
    table: str, changes: list[Change], before: Database, after: Database
) -> dict[str, Any]:
    keyed = sorted((c["pk"], c["name"]) for c in _columns(after, table) if c["pk"])
    key = [name for _, name in keyed] or ["rowid"]
    kinds: dict[str, list[dict[str, Any]]] = {"insert": [], "delete": [], "modify": []}
    for change in changes:
        row = {"row_id": change.pk, "data": {k: _cell(v) for k, v in change.row.items()}}
        if change.kind == "modify":
            row["changes"] = _changed_columns(change, before)
        kinds[change.kind].append(row)
    total = after.column(f'select count(*) from "{table}"')[0]
    return {
        "table_name": table,
        "primary_key": key,
        "added_rows": kinds["insert"],
        "removed_rows": kinds["delete"],
        "modified_rows": kinds["modify"],
        "unchanged_count": total - len(kinds["insert"]) - len(kinds["modify"]),
        "total_changes": len(changes),
    }


def _changed_columns(change: Change, before: Database) -> Mapping[str, Any]:
    values = change.pk if isinstance(change.pk, tuple) else (change.pk,)
    where = " and ".join(f'"{name}" is ?' for name in change.key_columns or ("rowid",))
    old = before.row(f'select * from "{change.table}" where {where}', *values) or {}
    return {
        name: {"before": _cell(old.get(name)), "after": _cell(change.row[name])}
        for name in sorted(change.altered)
    }


def _cell(value: Any) -> Any:
    """Convert bytes and infinities, which JSON cannot express."""
    if isinstance(value, bytes):
        return value.hex()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
