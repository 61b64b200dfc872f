"""Database: a SQLite database in memory, opened from an image in a fraction of a millisecond."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from skyfleet.errors import EnvError

Row = dict[str, Any]


class Database:
    def __init__(self, image: bytes | None = None) -> None:
        self.connection = sqlite3.connect(":memory:", isolation_level=None)
        if image is not None:
            self.connection.deserialize(image)

    def rows(self, sql: str, *values: object) -> list[Row]:
        cursor = self.connection.execute(sql, values)
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor]

    def row(self, sql: str, *values: object) -> Row | None:
        """The first row, if there is one."""
        return next(iter(self.rows(sql, *values)), None)

    def column(self, sql: str, *values: object) -> list[Any]:
        """The first value of every row."""
        return [row[0] for row in self.connection.execute(sql, values)]

    def write(self, sql: str, *values: object) -> None:
        self.connection.execute(sql, values)

    def insert(self, table: str, **values: object) -> int:
        """Add one row; returns its row id."""
        places = ", ".join("?" * len(values))
        sql = f"insert into {table} ({', '.join(values)}) values ({places})"
        return self.connection.execute(sql, tuple(values.values())).lastrowid or 0

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        self.connection.execute("savepoint undo")
        try:
            yield
        except BaseException:
            self.connection.execute("rollback to undo")
            raise
        finally:
            self.connection.execute("release undo")

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Whatever is written in here is gone afterwards."""
        self.connection.execute("savepoint trial")
        try:
            yield
        finally:
            self.connection.execute("rollback to trial")
            self.connection.execute("release trial")

    @contextmanager
    def unwritten(self) -> Iterator[None]:
        """EnvError if rows were written in here: a bug of the world's, whose episode is over."""
        before = self.connection.total_changes
        yield
        if self.connection.total_changes != before:
            raise EnvError(
                "a tool that says it only reads has written; declare it with writes=True"
            )

    @contextmanager
    def read_only(self) -> Iterator[None]:
        """A statement that would write raises in here."""
        self.connection.execute("pragma query_only = on")
        try:
            yield
        finally:
            self.connection.execute("pragma query_only = off")

    def image(self) -> bytes:
        return self.connection.serialize()

    def close(self) -> None:
        self.connection.close()
