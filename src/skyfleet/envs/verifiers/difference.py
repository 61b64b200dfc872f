"""Compare two database states and check the changes against what a verifier expects.

Every table is compared unless its pages are identical, so an unwanted change cannot hide in a
table that the verifier does not name.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Literal

from skyfleet.envs.verifiers.states import find_touched_tables, read_cached

Kind = Literal["insert", "modify", "delete"]
Spec = Mapping[str, Any]
"""A change as verifiers write it: table, pk, type, and fields or resulting_fields."""


@dataclass(frozen=True, slots=True)
class IgnoreConfig:
    """What a verifier ignores; None ignores nothing."""

    tables: Collection[str] | None = None
    fields: Collection[str] | None = None
    """Columns ignored in every table."""
    table_fields: Mapping[str, Collection[str]] | None = None

    def should_ignore_table(self, table: str) -> bool:
        return table in (self.tables or ())

    def should_ignore_field(self, table: str, field: str) -> bool:
        return field in (self.fields or ()) or field in (self.table_fields or {}).get(table, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    table: str
    pk: object
    """The primary key; a tuple when it has several columns."""
    kind: Kind
    row: Mapping[str, Any]
    """The row as it is now; for a delete, as it was."""
    altered: frozenset[str] = frozenset()
    """The columns that a modify changed."""
    key_columns: tuple[str, ...] = ()
    """The columns of `pk`; empty if rows are identified by rowid."""

    def __str__(self) -> str:
        columns = sorted(self.altered) or list(self.row)
        values = ", ".join(f"{column}={self.row[column]!r}" for column in columns)
        return f"{self.kind} {self.table} {self.pk}: {values}"


class Difference:
    def __init__(
        self,
        before: sqlite3.Connection,
        after: sqlite3.Connection,
        ignore_config: IgnoreConfig | None = None,
    ) -> None:
        ignore = ignore_config or IgnoreConfig()
        self._tables = table_names(before)
        touched, like = find_touched_tables(before, after), before
        if touched is None:
            self._tables = touched = self._tables | table_names(after)
            like = after
        self.changes = tuple(
            change
            for table in sorted(self._tables & touched)
            if not ignore.should_ignore_table(table)
            for change in _compare(
                table,
                read_cached(before, _read_rows, table),
                _read_rows(after, table, like),
                ignore,
            )
        )

    def expect_exactly(self, expected_changes: Sequence[Spec]) -> Difference:
        """Assert that every change is expected and everything expected happened."""
        wanted: dict[tuple[str, Kind, tuple[str, ...]], Spec] = {}
        for spec in expected_changes:
            if spec.get("type") not in ("insert", "modify", "delete") or "pk" not in spec:
                raise ValueError(f"{spec}: expect_exactly needs table, pk and type in every spec")
            wanted[spec["table"], spec["type"], _normalize_key(spec["pk"])] = spec
        self._check_tables(expected_changes)
        problems = []
        for change in self.changes:
            key = (change.table, change.kind, _normalize_key(change.pk))
            problems += (
                _find_mismatches(change, wanted.pop(key))
                if key in wanted
                else [f"unexpected {change}"]
            )
        problems += [f"missing {kind} {table} {', '.join(pk)}" for table, kind, pk in wanted]
        return self._require_none(problems)

    def expect_only_v2(self, allowed_changes: Sequence[Spec]) -> Difference:
        """Assert that every change is allowed; allowed changes need not have happened."""
        self._check_tables(allowed_changes)
        problems: list[str] = []
        for change in self.changes:
            specs = [
                spec
                for spec in allowed_changes
                if spec["table"] == change.table
                and _normalize_key(spec.get("pk")) == _normalize_key(change.pk)
            ]
            problems += _find_unallowed(change, specs)
        return self._require_none(problems)

    def expect_only(self, allowed_changes: Sequence[Spec]) -> Difference:
        """Like `expect_only_v2` with the older keys: only `field` and `after` count."""
        newer = ("type", "fields")
        older = [{k: v for k, v in spec.items() if k not in newer} for spec in allowed_changes]
        return self.expect_only_v2(older)

    def expect(
        self, *, allow: Sequence[Spec] | None = None, forbid: Sequence[Spec] | None = None
    ) -> Difference:
        """Assert that no forbidden column was modified and, given `allow`, only allowed ones.

        A spec without a field forbids inserts and deletes in its table.
        """
        allowed = {(spec["table"], spec.get("field")) for spec in allow or ()}
        forbidden = {(spec["table"], spec.get("field")) for spec in forbid or ()}
        problems = []
        for change in self.changes:
            columns = change.altered if change.kind == "modify" else [None]
            touched = {(change.table, column) for column in columns}
            unlisted = change.kind == "modify" and allowed and touched - allowed
            if touched & forbidden or unlisted:
                problems.append(f"unexpected {change}")
        return self._require_none(problems)

    def _check_tables(self, specs: Iterable[Spec]) -> None:
        if unknown := {spec["table"] for spec in specs} - self._tables:
            raise ValueError(f"no table {sorted(unknown)}; choose from {sorted(self._tables)}")

    def _require_none(self, problems: Sequence[str]) -> Difference:
        if problems:
            raise AssertionError("; ".join(problems))
        return self


def table_names(connection: sqlite3.Connection) -> set[str]:
    return read_cached(connection, _table_names, "sqlite_master")


def _table_names(connection: sqlite3.Connection, catalogue: str) -> set[str]:
    query = f"select name from {catalogue} where type = 'table' and name not like 'sqlite_%'"
    return {name for (name,) in connection.execute(query)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """A table's rows as SQLite returns them; only changed rows are converted to dicts."""

    columns: Sequence[str] = ()
    key_columns: tuple[str, ...] = ()
    by_key: Mapping[object, tuple[Any, ...]] = field(default_factory=dict)

    def to_dict(self, key: object) -> dict[str, Any]:
        return dict(zip(self.columns, self.by_key[key], strict=True))


def _read_rows(
    connection: sqlite3.Connection, table: str, like: sqlite3.Connection | None = None
) -> _Rows:
    """Return all rows by primary key, else by id, else by rowid; empty if there is no such table.

    A key that occurs twice (a primary key may hold null twice) falls back to the rowid, because
    one row would hide the other. `like` is a connection with the same schema.
    """
    key_columns = read_cached(like or connection, _key_columns, table)
    if key_columns is None:
        return _Rows()
    cursor = connection.execute(f'select * from "{table}"')
    columns, rows = [column[0] for column in cursor.description], cursor.fetchall()
    if key_columns:
        key_of = itemgetter(*map(columns.index, key_columns))
        by_key = {key_of(row): row for row in rows}
        if len(by_key) == len(rows):
            return _Rows(columns=columns, key_columns=key_columns, by_key=by_key)
    found = connection.execute(f'select rowid, * from "{table}"')
    return _Rows(columns=columns, by_key={row[0]: row[1:] for row in found})


def _key_columns(connection: sqlite3.Connection, table: str) -> tuple[str, ...] | None:
    info = connection.execute(f'pragma table_info("{table}")').fetchall()
    primary = tuple(c[1] for c in sorted(info, key=lambda column: column[5]) if c[5])
    return (primary or tuple(c[1] for c in info if c[1] == "id")) if info else None


def _compare(table: str, before: _Rows, after: _Rows, ignore: IgnoreConfig) -> Iterator[Change]:
    def drop_ignored(row: Mapping[str, Any]) -> dict[str, Any]:
        return {n: value for n, value in row.items() if not ignore.should_ignore_field(table, n)}

    known, same_columns = before.by_key, before.columns == after.columns
    for pk, row in after.by_key.items():
        if pk not in known:
            yield Change(table=table, pk=pk, kind="insert", row=drop_ignored(after.to_dict(pk)))
        elif known[pk] != row or not same_columns:
            old, new = before.to_dict(pk), drop_ignored(after.to_dict(pk))
            altered = frozenset(n for n, value in new.items() if not _is_equal(value, old.get(n)))
            if altered:
                yield Change(
                    table=table,
                    pk=pk,
                    kind="modify",
                    row=new,
                    altered=altered,
                    key_columns=after.key_columns,
                )
    for pk in before.by_key:
        if pk not in after.by_key:
            yield Change(table=table, pk=pk, kind="delete", row=drop_ignored(before.to_dict(pk)))


def _find_mismatches(change: Change, spec: Spec) -> list[str]:
    """Describe how a change differs from the spec of the same row and kind."""
    listed = spec.get("resulting_fields" if change.kind == "modify" else "fields")
    if listed is None:
        return []
    wanted = dict(listed)
    if change.kind == "modify" and not isinstance(spec.get("no_other_changes"), bool):
        raise ValueError(f"{spec}: resulting_fields needs no_other_changes, True or False")
    # Fleet compares only changed columns; here an expected value that never appeared counts too.
    mismatches = [
        f"{change.table} {change.pk}: {name} is {change.row[name]!r}, expected {value!r}"
        for name, value in wanted.items()
        if value is not ... and name in change.row and not _is_equal(change.row[name], value)
    ]
    unlisted: set[str] = set()
    if change.kind == "insert":
        unlisted = change.row.keys() - wanted.keys()
    elif spec.get("no_other_changes"):
        unlisted = set(change.altered) - wanted.keys()
    return [
        *mismatches,
        *(f"{change.table} {change.pk}: unexpected {name}" for name in sorted(unlisted)),
    ]


def _find_unallowed(change: Change, specs: Sequence[Spec]) -> list[str]:
    for spec in specs:
        if spec.get("type") == change.kind:
            return _find_mismatches(change, spec)
    if change.kind == "modify":
        allowed = [(spec.get("field"), spec.get("after")) for spec in specs]
        return [
            f"unexpected {change}: {name}"
            for name in sorted(change.altered)
            if not any(name == field and _is_equal(change.row[name], v) for field, v in allowed)
        ]
    marker = "__added__" if change.kind == "insert" else "__removed__"
    if any(spec.get("after") == marker and spec.get("fields") is None for spec in specs):
        return []
    return [f"unexpected {change}"]


def _normalize_key(pk: object) -> tuple[str, ...]:
    """Verifiers write 7 and "7" for the same key."""
    parts = pk if isinstance(pk, list | tuple) else (pk,)
    return tuple(str(part) for part in parts)


def _is_equal(a: object, b: object) -> bool:
    """Whether both are equal, or two spellings of the same JSON object or list."""
    if a == b:
        return True
    if not (isinstance(a, str) and isinstance(b, str) and _is_json(a) and _is_json(b)):
        return False
    try:
        return bool(json.loads(a) == json.loads(b))
    except ValueError:
        return False


def _is_json(text: str) -> bool:
    bare = text.strip()
    return bare[:1] + bare[-1:] in ("{}", "[]")
