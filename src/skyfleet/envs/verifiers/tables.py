"""Snapshot and Query: the interface by which a verifier reads a database."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from skyfleet.envs.verifiers.difference import Difference, IgnoreConfig, table_names


class Snapshot:
    """One state of a database."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def table(self, name: str) -> Query:
        return Query(connection=self._connection, source=name)

    def tables(self) -> list[str]:
        return sorted(table_names(self._connection))

    def diff(self, other: Snapshot, ignore_config: IgnoreConfig | None = None) -> Difference:
        """Return what changed from this state to the other."""
        return Difference(self._connection, other._connection, ignore_config)

    def expect_row(
        self, table: str, where: Mapping[str, object], expect: Mapping[str, object]
    ) -> Snapshot:
        query = self._matching(table, where).assert_exists()
        for column, value in expect.items():
            query.assert_eq(column, value)
        return self

    def expect_rows(
        self,
        table: str,
        where: Mapping[str, object],
        *,
        count: int | None = None,
        contains: Sequence[Mapping[str, object]] | None = None,
    ) -> Snapshot:
        query = self._matching(table, where)
        if count is not None:
            query.count().assert_eq(count)
        rows = query.all() if contains else []
        for wanted in contains or ():
            found = any(all(row.get(k) == v for k, v in wanted.items()) for row in rows)
            _require(found, f"no row like {wanted} in {query.explain()}")
        return self

    def expect_absent_row(self, table: str, where: Mapping[str, object]) -> Snapshot:
        self._matching(table, where).assert_none()
        return self

    def _matching(self, table: str, where: Mapping[str, object]) -> Query:
        query = self.table(table)
        for column, value in where.items():
            query = query.eq(column, value)
        return query


def snapshot_diff(
    before: Snapshot, after: Snapshot, ignore_config: IgnoreConfig | None = None
) -> Difference:
    """Return `before.diff(after)`, for verifiers that construct a SnapshotDiff."""
    return before.diff(after, ignore_config)


class Count(int):
    """A number of rows with assertion methods."""

    @property
    def value(self) -> int:
        return int(self)

    def assert_eq(self, expected: int) -> Count:
        _require(self == expected, f"expected {expected} rows, found {self}")
        return self

    def assert_gt(self, threshold: int) -> Count:
        _require(self > threshold, f"expected more than {threshold} rows, found {self}")
        return self

    def assert_between(self, low: int, high: int) -> Count:
        _require(low <= self <= high, f"expected {low} to {high} rows, found {self}")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """An immutable query builder: every call returns a new query.

    Column and table names go into the SQL verbatim, so `select("count(*) as n")` works.
    """

    connection: sqlite3.Connection
    source: str
    joins: str = ""
    columns: tuple[str, ...] = ("*",)
    conditions: tuple[str, ...] = ()
    values: tuple[Any, ...] = ()
    order: str = ""
    most: int | None = None

    def select(self, *columns: str) -> Query:
        return replace(self, columns=columns or ("*",))

    def sort(self, column: str, desc: bool = False) -> Query:
        return replace(self, order=f" order by {column} {'desc' if desc else 'asc'}")

    def limit(self, n: int) -> Query:
        return replace(self, most=n)

    def join(self, other_table: str, on: dict[str, str]) -> Query:
        """`on` maps a column of this table to one of the other."""
        pairs = " and ".join(f"{self.source}.{a} = {other_table}.{b}" for a, b in on.items())
        return replace(self, joins=f"{self.joins} join {other_table} on {pairs}")

    def eq(self, column: str, value: object) -> Query:
        return self._where(f"{column} = ?", value)

    def neq(self, column: str, value: object) -> Query:
        return self._where(f"{column} != ?", value)

    def gt(self, column: str, value: object) -> Query:
        return self._where(f"{column} > ?", value)

    def gte(self, column: str, value: object) -> Query:
        return self._where(f"{column} >= ?", value)

    def lt(self, column: str, value: object) -> Query:
        return self._where(f"{column} < ?", value)

    def lte(self, column: str, value: object) -> Query:
        return self._where(f"{column} <= ?", value)

    def in_(self, column: str, values: Iterable[object]) -> Query:
        options = tuple(values)
        return self._where(f"{column} in ({', '.join('?' * len(options))})", *options)

    def not_in(self, column: str, values: Iterable[object]) -> Query:
        options = tuple(values)
        return self._where(f"{column} not in ({', '.join('?' * len(options))})", *options)

    def is_null(self, column: str) -> Query:
        return self._where(f"{column} is null")

    def not_null(self, column: str) -> Query:
        return self._where(f"{column} is not null")

    def ilike(self, column: str, pattern: str) -> Query:
        return self._where(f"{column} like ?", pattern)

    def all(self) -> list[dict[str, Any]]:
        cursor = self.connection.execute(self._sql, self.values)
        positions: dict[str, int] = {}
        for position, column in enumerate(cursor.description):
            # If a join has two columns of one name, the first table's counts.
            positions.setdefault(column[0], position)
        return [{name: row[position] for name, position in positions.items()} for row in cursor]

    def first(self) -> dict[str, Any] | None:
        rows = self.limit(1).all()
        return rows[0] if rows else None

    def count(self) -> Count:
        return Count(replace(self, columns=("count(*) as n",), most=None).all()[0]["n"])

    def assert_exists(self) -> Query:
        _require(self.first() is not None, f"no row in {self.explain()}")
        return self

    def assert_none(self) -> Query:
        row = self.first()
        _require(row is None, f"expected no row in {self.explain()}, found {row}")
        return self

    def assert_eq(self, column: str, value: object) -> Query:
        self.assert_exists()
        found = (self.first() or {}).get(column)
        _require(found == value, f"{column} is {found!r} in {self.explain()}, expected {value!r}")
        return self

    def explain(self) -> str:
        return f"{self._sql} with {self.values}"

    @property
    def _sql(self) -> str:
        where = f" where {' and '.join(self.conditions)}" if self.conditions else ""
        limit = "" if self.most is None else f" limit {self.most}"
        columns = ", ".join(self.columns)
        return f"select {columns} from {self.source}{self.joins}{where}{self.order}{limit}"

    def _where(self, condition: str, *values: object) -> Query:
        return replace(
            self, conditions=(*self.conditions, condition), values=(*self.values, *values)
        )


def _require(condition: bool, problem: str) -> None:
    # Not an assert statement: python -O would remove it.
    if not condition:
        raise AssertionError(problem)
