"""In-memory SQLite database, opened from a serialized image in less than a millisecond."""

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
        """Return the first row, or None."""
        return next(iter(self.rows(sql, *values)), None)

    def column(self, sql: str, *values: object) -> list[Any]:
        """Return the first value of every row."""
        return [row[0] for row in self.connection.execute(sql, values)]

    def write(self, sql: str, *values: object) -> None:
        self.connection.execute(sql, values)

    def insert(self, table: str, **values: object) -> int:
        """Insert one row and return its row id."""
        places = ", ".join("?" * len(values))
        sql = f"insert into {table} ({', '.join(values)}) values ({places})"
        return self.connection.execute(sql, tuple(values.values())).lastrowid or 0

    @contextmanager
    def rollback_on_error(self) -> Iterator[None]:
        self.connection.execute("savepoint undo")
        try:
            yield
        except BaseException:
            self.connection.execute("rollback to undo")
            raise
        finally:
            self.connection.execute("release undo")

    @contextmanager
    def rollback_at_end(self) -> Iterator[None]:
        """Roll back everything that the block writes."""
        self.connection.execute("savepoint trial")
        try:
            yield
        finally:
            self.connection.execute("rollback to trial")
            self.connection.execute("release trial")

    @contextmanager
    def forbid_writes(self) -> Iterator[None]:
        """Raise EnvError if the block wrote rows: that is a bug in the world, not the agent's error."""
        before = self.connection.total_changes
        yield
        if self.connection.total_changes != before:
            raise EnvError(
                "a tool declared with @world.reads has written rows; declare it with @world.writes"
            )

    @contextmanager
    def read_only(self) -> Iterator[None]:
        """Make every writing statement in the block raise."""
        self.connection.execute("pragma query_only = on")
        try:
            yield
        finally:
            self.connection.execute("pragma query_only = off")

    def image(self) -> bytes:
        return self.connection.serialize()

    def close(self) -> None:
        self.connection.close()
