"""Tasks on disk or in S3: .json, .jsonl and .parquet in and out, with errors that name the row."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from io import BytesIO, TextIOWrapper
from pathlib import Path
from reprlib import Repr
from typing import Any

from pydantic import AliasChoices, ValidationError

from skyfleet.errors import TaskError
from skyfleet.storage.store import is_remote, read_bytes, write_bytes
from skyfleet.tasks.task import Task

NESTED = ("env_variables", "solution", "metadata")
"""JSON text in parquet: a struct column would give every row the union of all rows' keys."""

DEEPEST = 100
"""Levels of a row: what reads them here takes more than what writes them again."""

_SPELLINGS = [
    [str(spelling) for spelling in field.validation_alias.choices]
    for field in Task.model_fields.values()
    if isinstance(field.validation_alias, AliasChoices)
]

_shown = Repr()
_shown.maxstring = _shown.maxother = 60
_shown.maxdict = _shown.maxlist = 3


def load_tasks(address: Path | str) -> list[Task]:
    """Every row of the file, in order; a key that is there twice is refused."""
    first: dict[str, int] = {}
    numbered = read_tasks(address)
    for number, task in numbered:
        if first.setdefault(task.key, number) != number:
            raise TaskError(
                f"{address} row {number}: key={task.key!r} is already row {first[task.key]}; "
                "give every task its own key"
            )
    return [task for _, task in numbered]


def read_tasks(address: Path | str) -> list[tuple[int, Task]]:
    """Every row with its number, from 1; a key may be there twice."""
    return parse_tasks(read_source(address), address)


def read_source(address: Path | str) -> bytes:
    """A task file as it stands, for whoever wants its hash and its rows to be of the same bytes."""
    if Path(address).suffix not in _READERS:
        raise _unknown_suffix(address)
    if not is_remote(address) and not Path(address).is_file():
        raise TaskError(f"{address}: no such file; give the path of a task file")
    return read_bytes(address)


def parse_tasks(data: bytes, address: Path | str) -> list[tuple[int, Task]]:
    """As `read_tasks`, of bytes that are already here; the address says their format."""
    rows = _READERS[Path(address).suffix]
    try:
        tasks = [(number, _task(row, where)) for number, row, where in rows(data, str(address))]
    except UnicodeDecodeError as error:
        raise TaskError(f"{address}: {error}; save the file as UTF-8") from None
    if not tasks:
        raise TaskError(f"{address}: holds no task; write at least one row")
    return tasks


def write_tasks(address: Path | str, tasks: Iterable[Task]) -> None:
    """`load_tasks(address)` gives the same tasks back; an existing file is replaced whole."""
    rows = [task.model_dump() for task in tasks]
    match Path(address).suffix:
        case ".json":
            data = (json.dumps(rows, ensure_ascii=False, indent=1) + "\n").encode()
        case ".jsonl":
            data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        case ".parquet":
            data = _parquet_bytes(rows)
        case _:
            raise _unknown_suffix(address)
    write_bytes(address, data)


_Rows = Iterator[tuple[int, Any, str]]
"""Number, row, and where it is, for errors."""


def _json_rows(data: bytes, address: str) -> _Rows:
    top = _decoded(data.decode("utf-8-sig"), address)
    if isinstance(top, dict) and "tasks" in top:
        top = top["tasks"]
    if not isinstance(top, list):
        raise TaskError(
            f"{address}: top level is {_shown.repr(top)}; "
            'write an array of tasks, or {"tasks": [...]} around it'
        )
    for number, row in enumerate(top, start=1):
        yield number, row, f"{address} row {number}"


def _jsonl_rows(data: bytes, address: str) -> _Rows:
    for number, line in enumerate(TextIOWrapper(BytesIO(data), encoding="utf-8-sig"), start=1):
        if line.strip():
            where = f"{address} row {number}"
            yield number, _decoded(line, where), where


def _parquet_rows(data: bytes, address: str) -> _Rows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(pa.BufferReader(data)).to_pylist()
    except pa.ArrowException as error:
        raise TaskError(f"{address}: not parquet ({error}); write it again") from None
    for number, row in enumerate(rows, start=1):
        where = f"{address} row {number}"
        for field in NESTED:
            if isinstance(text := row.get(field), str):
                row[field] = _decoded(text, f"{where}: {field}={_shown.repr(text)}")
        yield number, row, where


_READERS = {".json": _json_rows, ".jsonl": _jsonl_rows, ".parquet": _parquet_rows}


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
    except (ValueError, RecursionError) as error:
        raise TaskError(
            f"{where}: more than can be read ({error}); write a shorter number or nest it less"
        ) from None


def _task(row: Any, where: str) -> Task:
    if not isinstance(row, dict):
        raise TaskError(f"{where}: {_shown.repr(row)} is not an object; write key, env_key, prompt")
    if _deeper_than(DEEPEST, row):
        raise TaskError(f"{where}: more than {DEEPEST} levels deep; nest it less")
    # A table has every column in every row: null means that this row does not give it.
    given = {name: value for name, value in row.items() if value is not None}
    _check_spellings(given, where)
    if isinstance(given.get("prompt"), list):
        given["prompt"] = _only_message(given["prompt"], where)
    if "data_source" in given and not {"env_key", "env_id"} & given.keys():
        given["env_key"] = given["data_source"]
    for name in given.keys() & set(NESTED):
        _check_text(given[name], f"{where}: {name}={_shown.repr(given[name])}")
    try:
        return Task.model_validate(given)
    except ValidationError as error:
        problems = "; ".join(_explained(problem) for problem in error.errors())
        raise TaskError(f"{where}: {problems}") from None


def _deeper_than(levels: int, value: Any) -> bool:
    inside = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list) or not inside:
        return False
    return levels == 0 or any(_deeper_than(levels - 1, one) for one in inside)


def _check_text(value: Any, where: str) -> None:
    """Of the other fields the model refuses it: half a surrogate pair is in no file's encoding."""
    try:
        json.dumps(value, ensure_ascii=False, default=repr).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start : error.end]
        raise TaskError(f"{where}; {half!r} is half a character; write all of it") from None


def _check_spellings(row: Mapping[str, Any], where: str) -> None:
    for spellings in _SPELLINGS:
        first, *others = [name for name in spellings if name in row] or [""]
        for other in others:
            if row[first] != row[other]:
                raise TaskError(
                    f"{where}: {first}={_shown.repr(row[first])} and "
                    f"{other}={_shown.repr(row[other])} are the same field; keep one"
                )


def _only_message(messages: list[Any], where: str) -> object:
    """SkyRL's tables hold the prompt as a conversation of one user message."""
    match messages:
        case [{"role": "user", "content": content}]:
            return content
    raise TaskError(f"{where}: prompt={_shown.repr(messages)}; write text, or one user message")


def _explained(problem: Mapping[str, Any]) -> str:
    field = ".".join(map(str, problem["loc"]))
    if problem["type"] == "missing":
        return f"{field} is missing; add it"
    return f"{field}={_shown.repr(problem['input'])}; {problem['msg']}"


def _unknown_suffix(address: Path | str) -> TaskError:
    suffix = Path(address).suffix
    return TaskError(f"{address}: suffix {suffix!r}; choose from .json, .jsonl, .parquet")
