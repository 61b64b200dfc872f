"""Compare databases record by record, with the verdict that a package's own hashes have.

An initial database is stored once. What an episode changed is found with fast comparisons that may
only err towards "changed"; a record that may have changed is then compared by the text that the
package hashes. Two databases are equal for the package exactly if these changes are equal.
"""

from __future__ import annotations

import json
import marshal
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any, Protocol

Changes = Mapping[tuple[str, str], str | None]
"""By table and key: the text of each record that differs from the initial one; None: it is gone."""


class InitialState(Protocol):
    def copy(self) -> Any:
        """Return a database of its own for one episode."""
        ...

    def find_changes(self, state: Any) -> Changes: ...


class InitialTables:
    """A database of plain dicts and lists, as in tau-bench."""

    def __init__(self, tables: Mapping[str, Any], to_text: Callable[[Any], str]) -> None:
        """`to_text` is what the package hashes."""
        self._packed = marshal.dumps(dict(tables))
        self._to_text = to_text
        self._records = {place: _pack(record) for place, record in _list_records(tables)}

    def copy(self) -> Any:
        return marshal.loads(self._packed)

    def find_changes(self, state: Mapping[str, Any]) -> Changes:
        changes: dict[tuple[str, str], str | None] = {}
        n_seen = 0
        for place, record in _list_records(state):
            initial = self._records.get(place)
            n_seen += initial is not None
            # Equal bytes are equal values and types; dicts in another order have other bytes.
            if initial is not None and _pack(record) == initial:
                continue
            text = self._to_text(record)
            if initial is None or text != self._to_text(marshal.loads(initial)):
                changes[place] = text
        if n_seen < len(self._records):
            present = {place for place, _ in _list_records(state)}
            changes |= dict.fromkeys(self._records.keys() - present)
        return changes


def _list_records(tables: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], Any]]:
    for name, rows in tables.items():
        if isinstance(rows, dict):
            # The empty table is a place of its own: it differs from no table.
            yield (name, ""), None
            for key, record in rows.items():
                yield (name, f"{type(key).__name__} {key}"), record
        else:
            yield (name, ""), rows


def _pack(record: Any) -> bytes:
    try:
        # Version 2 writes every value out, so that the bytes do not depend on shared objects.
        return marshal.dumps(record, 2)
    except ValueError:
        return b""  # An object of some class, which only a tool can have put there.


class InitialModels:
    """Databases of pydantic models, as in tau2: the agent's, and the user's if it has one."""

    def __init__(self, databases: Mapping[str, Any]) -> None:
        self._databases = databases
        self._packed = pickle.dumps(databases, protocol=pickle.HIGHEST_PROTOCOL)

    def copy(self) -> Any:
        return pickle.loads(self._packed)

    def find_changes(self, state: Mapping[str, Any]) -> Changes:
        changes: dict[tuple[str, str], str | None] = {}
        for name, initial in self._databases.items():
            for place, text in _find_model_changes(initial, state[name]).items():
                changes[f"{name}.{place[0]}", place[1]] = text
        return changes


def _find_model_changes(initial: Any, current: Any) -> Changes:
    if type(initial) is not type(current):
        # tau2 may put the agent's database in the place of the user's.
        return {("", ""): f"{type(current).__name__} {_dump(current, None)}"}
    changes: dict[tuple[str, str], str | None] = {}
    fields_now = vars(current)
    for table, rows in vars(initial).items():
        rows_now = fields_now[table]
        if not (type(rows) is type(rows_now) is dict):
            if not _is_same(rows, rows_now):
                before, now = (_dump(db, {table}) for db in (initial, current))
                if before != now:
                    changes[table, ""] = now
            continue
        for key in rows.keys() - rows_now.keys():
            changes[table, key] = None
        for key, record in rows_now.items():
            if key in rows and _is_same(rows[key], record):
                continue
            now = _dump(current, {table: {key}})
            if key not in rows or now != _dump(initial, {table: {key}}):
                changes[table, key] = now
    return changes


def _dump(database: Any, include: Any) -> str:
    """The part of the text that tau2 hashes."""
    with warnings.catch_warnings():
        # A tool may assign another type than the field's; tau2 hashes it all the same.
        warnings.simplefilter("ignore")
        return json.dumps(database.model_dump(include=include), sort_keys=True, default=str)


def _is_same(a: Any, b: Any) -> bool:
    """Whether both have the same values of the same types; False also where this is not known."""
    kind = type(a)
    if kind is not type(b):
        return False
    if kind is str or kind is int or kind is bool or a is None:
        return bool(a == b)
    if kind is float:
        return repr(a) == repr(b)
    if kind is dict:
        return len(a) == len(b) and all(k in b and _is_same(v, b[k]) for k, v in a.items())
    if kind is list or kind is tuple:
        return len(a) == len(b) and all(map(_is_same, a, b))
    if isinstance(a, Enum):
        return a is b
    if hasattr(kind, "model_fields"):
        return _is_same(vars(a), vars(b))
    return False
