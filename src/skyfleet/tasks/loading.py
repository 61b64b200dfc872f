"""Tasks on disk: .json, .jsonl and .parquet in and out, with errors that name the row."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from reprlib import Repr
from typing import Any

from pydantic import ValidationError

from skyfleet.errors import TaskError
from skyfleet.storage.local import write_atomically
from skyfleet.tasks.task import Task

NESTED = ("env_variables", "solution", "metadata")
"""JSON text in parquet: a struct column would give every row the union of all rows' keys."""

_shown = Repr()
_shown.maxstring = _shown.maxother = 60
_shown.maxdict = _shown.maxlist = 3


def load_tasks(path: Path | str) -> list[Task]:
    """Every row of the file, in order."""
    path = Path(path)
    read = {".json": _json_rows, ".jsonl": _jsonl_rows, ".parquet": _parquet_rows}.get(path.suffix)
    if read is None:
        raise _unknown_suffix(path)
    if not path.is_file():
        raise TaskError(f"{path}: no such file; give the path of a task file")
    try:
        tasks = [(number, _task(row, f"{path} row {number}")) for number, row in read(path)]
    except UnicodeDecodeError as error:
        raise TaskError(f"{path}: {error}; save the file as UTF-8") from None
    if not tasks:
        raise TaskError(f"{path}: holds no task; write at least one row")
    first: dict[str, int] = {}
    for number, task in tasks:
        if first.setdefault(task.key, number) != number:
            raise TaskError(
                f"{path} row {number}: key={task.key!r} is already row {first[task.key]}; "
                "give every task its own key"
            )
    return [task for _, task in tasks]


def write_tasks(path: Path | str, tasks: Iterable[Task]) -> None:
    """`load_tasks(path)` gives the same tasks back; an existing file is replaced whole."""
    path = Path(path)
    rows = [task.model_dump() for task in tasks]
    match path.suffix:
        case ".json":
            data: bytes | str = json.dumps(rows, ensure_ascii=False, indent=1) + "\n"
        case ".jsonl":
            data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        case ".parquet":
            data = _parquet_bytes(rows)
        case _:
            raise _unknown_suffix(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, data)


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    top = _decoded(path.read_text(encoding="utf-8-sig"), str(path))
    if isinstance(top, dict) and "tasks" in top:
        top = top["tasks"]
    if not isinstance(top, list):
        raise TaskError(
            f"{path}: top level is {_shown.repr(top)}; "
            'write an array of tasks, or {"tasks": [...]} around it'
        )
    return enumerate(top, start=1)


def _jsonl_rows(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, _decoded(line, f"{path} row {number}")


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(path).to_pylist()
    except pa.ArrowException as error:
        raise TaskError(f"{path}: not parquet ({error}); write it again") from None
    for number, row in enumerate(rows, start=1):
        for field in NESTED:
            if isinstance(text := row.get(field), str):
                row[field] = _decoded(text, f"{path} row {number}: {field}={_shown.repr(text)}")
        yield number, row


def _parquet_bytes(rows: list[dict[str, Any]]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for row in rows:
        row.update({field: json.dumps(row[field], ensure_ascii=False) for field in NESTED})
    # Spelled out, because a column in which every row is None has no type of its own.
    schema = pa.schema(
        [(name, pa.int64() if name == "difficulty" else pa.string()) for name in Task.model_fields]
    )
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), sink)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _decoded(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise TaskError(f"{where}: not JSON ({error}); correct it or write it again") from None


def _task(row: Any, where: str) -> Task:
    if not isinstance(row, dict):
        raise TaskError(f"{where}: {_shown.repr(row)} is not an object; write key, env_key, prompt")
    try:
        # A table has every column in every row: null means that this row does not give it.
        return Task.model_validate({name: v for name, v in row.items() if v is not None})
    except ValidationError as error:
        problems = "; ".join(_explained(problem) for problem in error.errors())
        raise TaskError(f"{where}: {problems}") from None


def _explained(problem: Mapping[str, Any]) -> str:
    field = ".".join(map(str, problem["loc"]))
    if problem["type"] == "missing":
        return f"{field} is missing; add it"
    return f"{field}={_shown.repr(problem['input'])}; {problem['msg']}"


def _unknown_suffix(path: Path) -> TaskError:
    return TaskError(f"{path}: suffix {path.suffix!r}; choose from .json, .jsonl, .parquet")
