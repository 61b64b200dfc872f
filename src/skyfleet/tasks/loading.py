"""Load and write task files: .json, .jsonl and .parquet, local or in a bucket."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

from skyfleet.errors import TaskError
from skyfleet.storage.store import is_remote, read_bytes, write_bytes
from skyfleet.tasks.rows import (
    JSON_FIELDS,
    decode_json,
    parse_rows,
    shorten,
    to_fleet_row,
    to_json_values,
    to_row,
)
from skyfleet.tasks.task import Task


def load_tasks(address: Path | str, *, default_env_key: str | None = None) -> list[Task]:
    """Load every row of a file, in order; a duplicate key is an error.

    `default_env_key` is the env_key of rows that name no environment; without it they are an error.
    """
    numbered = read_tasks(address, default_env_key=default_env_key)
    check_unique_keys(numbered, str(address))
    return [task for _, task in numbered]


def check_unique_keys(numbered: Iterable[tuple[int, Task]], source: str) -> None:
    first: dict[str, int] = {}
    for number, task in numbered:
        if first.setdefault(task.key, number) != number:
            raise TaskError(
                f"{source} row {number}: key={task.key!r} is already row {first[task.key]}; "
                "give every task its own key"
            )


def read_tasks(
    address: Path | str, *, default_env_key: str | None = None
) -> list[tuple[int, Task]]:
    """Load every row with its number, from 1; duplicate keys are allowed."""
    return parse_tasks(read_source(address), address, default_env_key=default_env_key)


def read_source(address: Path | str) -> bytes:
    """Read the bytes of a task file, so that a caller can hash and parse the same bytes."""
    if Path(address).suffix not in _READERS:
        raise _unknown_suffix(address)
    if not is_remote(address) and not Path(address).is_file():
        raise TaskError(f"{address}: no such file; give the path of a task file")
    return read_bytes(address)


def parse_tasks(
    data: bytes, address: Path | str, *, default_env_key: str | None = None
) -> list[tuple[int, Task]]:
    """As `read_tasks`, for bytes already read; the suffix of the address gives their format."""
    rows = _READERS[Path(address).suffix]
    try:
        tasks = parse_rows(rows(data, str(address)), default_env_key=default_env_key)
    except UnicodeDecodeError as error:
        raise TaskError(f"{address}: {error}; save the file as UTF-8") from None
    if not tasks:
        raise TaskError(f"{address}: contains no task; write at least one row")
    return tasks


def write_tasks(address: Path | str, tasks: Iterable[Task]) -> None:
    """Write tasks so that `load_tasks` returns the same; an existing file is replaced.

    JSON has the form that Fleet's scripts expect: an object with `tasks`, and their column names.
    """
    match Path(address).suffix:
        case ".json":
            rows = {"tasks": [to_fleet_row(task) for task in tasks]}
            data = (json.dumps(rows, ensure_ascii=False, indent=1) + "\n").encode()
        case ".jsonl":
            lines = (json.dumps(to_fleet_row(task), ensure_ascii=False) + "\n" for task in tasks)
            data = "".join(lines).encode()
        case ".parquet":
            data = _to_parquet([to_row(task) for task in tasks])
        case _:
            raise _unknown_suffix(address)
    write_bytes(address, data)


def drop_long_prompts(
    tasks: Iterable[Task], count_tokens: Callable[[Task], int], limit: int
) -> tuple[list[Task], int]:
    """Drop tasks whose prompt has more than `limit` tokens; returns the others and the count."""
    given = list(tasks)
    kept = [task for task in given if count_tokens(task) <= limit]
    return kept, len(given) - len(kept)


_Rows = Iterator[tuple[int, Any, str]]
"""Number, row, and location for error messages."""


def _read_json(data: bytes, address: str) -> _Rows:
    top = decode_json(data.decode("utf-8-sig"), address)
    if isinstance(top, dict) and "tasks" in top:
        top = top["tasks"]
    if not isinstance(top, list):
        raise TaskError(
            f"{address}: top level is {shorten(top)}; "
            'write an array of tasks, or {"tasks": [...]} around it'
        )
    for number, row in enumerate(top, start=1):
        yield number, row, f"{address} row {number}"


def _read_jsonl(data: bytes, address: str) -> _Rows:
    for number, line in enumerate(TextIOWrapper(BytesIO(data), encoding="utf-8-sig"), start=1):
        if line.strip():
            where = f"{address} row {number}"
            yield number, decode_json(line, where), where


def _read_parquet(data: bytes, address: str) -> _Rows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(pa.BufferReader(data)).to_pylist()
    except pa.ArrowException as error:
        raise TaskError(f"{address}: not parquet ({error}); write it again") from None
    for number, row in enumerate(rows, start=1):
        where = f"{address} row {number}"
        yield number, to_json_values(row, where), where


_READERS = {".json": _read_json, ".jsonl": _read_jsonl, ".parquet": _read_parquet}


def _to_parquet(rows: list[dict[str, Any]]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for row in rows:
        row.update({field: json.dumps(row[field], ensure_ascii=False) for field in JSON_FIELDS})
        if not isinstance(row["prompt"], str):
            row["prompt"] = json.dumps(row["prompt"], ensure_ascii=False)
    used = {name for row in rows for name in row}
    # An explicit schema, because a column in which every row is None has no type of its own.
    schema = pa.schema(
        [
            (name, pa.int64() if name == "difficulty" else pa.string())
            for name in Task.model_fields
            if name in used
        ]
    )
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), sink)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _unknown_suffix(address: Path | str) -> TaskError:
    suffix = Path(address).suffix
    return TaskError(f"{address}: suffix {suffix!r}; choose from .json, .jsonl, .parquet")
