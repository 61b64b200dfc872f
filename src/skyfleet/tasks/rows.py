"""Rows -> tasks: one parser for our own rows and those of Fleet, OpenEnv, SkyRL and the tau recipe.

A row is a dict. Its prompt is text, chat messages, or chat messages as JSON text. A missing key is
derived from the content. Every column that is not a field of `Task` goes into `metadata`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from reprlib import Repr
from typing import Any

from pydantic import AliasChoices, ValidationError
from pydantic_core import PydanticSerializationError, to_jsonable_python

from skyfleet.errors import TaskError
from skyfleet.tasks.task import Task, last_user_text

JSON_FIELDS = ("env_variables", "solution", "metadata")
"""Fields that tables hold as JSON text: a struct column would give every row the keys of all."""

MAX_DEPTH = 100
"""Nesting levels of a row: reading more levels is possible, writing them again is not."""

_JSON_COLUMNS = ("reward_spec", "reward_model", "extra_info")
"""SkyRL's and verl's columns, which the tau recipe stores as JSON text."""

_ROLES = ("system", "developer", "user", "assistant", "tool")

_FLEET_BOOKKEEPING = frozenset({"verifier_id", "verifier_sha", "verifier_runtime_version"})
"""Columns by which Fleet's service stores a verifier; the row itself contains the verifier."""

_ALIASES = [
    [str(alias) for alias in field.validation_alias.choices]
    for field in Task.model_fields.values()
    if isinstance(field.validation_alias, AliasChoices)
]
FIELD_COLUMNS = {alias for aliases in _ALIASES for alias in aliases} | set(Task.model_fields)
"""The columns that are fields of `Task`, by all their names."""

_shortener = Repr()
_shortener.maxstring = _shortener.maxother = 60
_shortener.maxdict = _shortener.maxlist = 3


def shorten(value: object) -> str:
    """`repr` of a value, short enough for an error message."""
    return _shortener.repr(value)


def parse_rows(
    rows: Iterable[tuple[int, Any, str]], *, default_env_key: str | None = None
) -> list[tuple[int, Task]]:
    """Parse rows, each with its number and its location for error messages.

    A derived key is a hash of the row's content: the same row has the same key in any file, format
    and order. Equal rows without a key get the suffixes -2, -3 and so on.
    """
    parsed = [
        (number, *_parse_row(row, where, default_env_key=default_env_key))
        for number, row, where in rows
    ]
    used = {task.key for _, task, has_key in parsed if has_key}
    tasks = []
    for number, task, has_key in parsed:
        if not has_key:
            task = task.model_copy(update={"key": _unused_key(task.key, used)})
            used.add(task.key)
        tasks.append((number, task))
    return tasks


def to_json_values(row: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """Convert the values of a table or a Python object to JSON types: dates, bytes, numpy arrays."""
    values = {}
    for name, value in row.items():
        try:
            values[str(name)] = to_jsonable_python(
                value, bytes_mode="base64", inf_nan_mode="constants", fallback=_from_numpy
            )
        except (PydanticSerializationError, TypeError, ValueError, RecursionError) as error:
            raise TaskError(
                f"{where}: {name}={shorten(value)} is not JSON ({error}); convert or remove it"
            ) from None
    return values


def decode_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise TaskError(f"{where}: not JSON ({error}); correct it or write it again") from None
    except (ValueError, RecursionError) as error:
        raise TaskError(
            f"{where}: too large to read ({error}); write a shorter number or nest it less"
        ) from None


def to_row(task: Task) -> dict[str, Any]:
    """The row of a task; `parse_rows` returns the same task."""
    row = task.model_dump()
    if messages := row.pop("messages", None):
        row["prompt"] = [dict(message) for message in messages]
    elif _decode_chat(task.prompt) is not None:
        # A text that looks like chat messages would be read as such.
        row["prompt"] = task.chat
    return row


_FLEET_NAMES = {"key": "task_key", "modality": "task_modality"}


def to_fleet_row(task: Task) -> dict[str, Any]:
    """The row of a task under the names by which Fleet's scripts and FleetTaskEnv read it."""
    return {_FLEET_NAMES.get(name, name): value for name, value in to_row(task).items()}


def _parse_row(row: Any, where: str, *, default_env_key: str | None) -> tuple[Task, bool]:
    """Return the task and whether the row has a key; without one, the key is the content's hash."""
    if not isinstance(row, dict):
        raise TaskError(f"{where}: {shorten(row)} is not an object; write key, env_key, prompt")
    if _is_deeper_than(MAX_DEPTH, row):
        raise TaskError(f"{where}: more than {MAX_DEPTH} levels deep; nest it less")
    # A table has every column in every row: null means that this row has no value.
    columns = {name: value for name, value in row.items() if value is not None}
    _check_aliases(columns, where)
    _decode_json_columns(columns, where)
    _read_prompt(columns, where)
    _read_env(columns, default_env_key)
    _collect_metadata(columns, where)
    for name in JSON_FIELDS:
        if name in columns:
            _check_encodable(columns[name], f"{where}: {name}={shorten(columns[name])}")
    has_key = not {"key", "task_key"}.isdisjoint(columns)
    try:
        task = Task.model_validate(columns if has_key else {**columns, "key": "derived"})
    except ValidationError as error:
        problems = "; ".join(_explain(problem) for problem in error.errors())
        raise TaskError(f"{where}: {problems}") from None
    return (task, True) if has_key else (task.model_copy(update={"key": _derive_key(task)}), False)


def _derive_key(task: Task) -> str:
    # Without defaults, so that a new field of Task changes no key.
    content = task.model_dump(mode="json", exclude={"key"}, exclude_defaults=True)
    text = json.dumps(_drop_null(content), sort_keys=True, ensure_ascii=False)
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{re.sub(r'[^0-9A-Za-z_.-]+', '_', task.env_key)}-{digest[:16]}"


def _drop_null(value: Any) -> Any:
    """A struct column of a table adds null for every key that only other rows have."""
    if isinstance(value, dict):
        return {name: _drop_null(one) for name, one in value.items() if one is not None}
    return [_drop_null(one) for one in value] if isinstance(value, list) else value


def _unused_key(key: str, used: set[str]) -> str:
    count, unused = 1, key
    while unused in used:
        count += 1
        unused = f"{key}-{count}"
    return unused


def _is_deeper_than(levels: int, value: Any) -> bool:
    inside = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list) or not inside:
        return False
    return levels == 0 or any(_is_deeper_than(levels - 1, one) for one in inside)


def _check_aliases(row: Mapping[str, Any], where: str) -> None:
    for aliases in _ALIASES:
        first, *others = [name for name in aliases if name in row] or [""]
        for other in others:
            if row[first] != row[other]:
                raise TaskError(
                    f"{where}: {first}={shorten(row[first])} and "
                    f"{other}={shorten(row[other])} are the same field; keep one"
                )


def _decode_json_columns(columns: dict[str, Any], where: str) -> None:
    for name in ("env_variables", "metadata"):
        if isinstance(text := columns.get(name), str):
            columns[name] = decode_json(text, f"{where}: {name}={shorten(text)}")
    for name in _JSON_COLUMNS:
        text = columns.get(name)
        if isinstance(text, str) and text.lstrip()[:1] in ("{", "["):
            columns[name] = decode_json(text, f"{where}: {name}={shorten(text)}")
    # A text that is not a list of tool calls is the answer to a question: it stays as it is.
    text = columns.get("solution")
    if isinstance(text, str) and re.match(r"\s*\[\s*(\{|\]\s*$)", text):
        columns["solution"] = decode_json(text, f"{where}: solution={shorten(text)}")


def _read_prompt(columns: dict[str, Any], where: str) -> None:
    """Split a chat prompt into `prompt`, the last user text, and `messages`, if more than one."""
    messages = columns.pop("messages", None)
    if "prompt" not in columns and _is_prompt(messages):
        columns["prompt"] = messages
    elif messages is not None:
        if not (_is_prompt(messages) and last_user_text(messages) == columns.get("prompt")):
            # Not this prompt, but a column of that name, such as a whole dialogue with its answer.
            _add_to_metadata(columns, {"messages": messages}, where)
        else:
            columns["prompt"] = messages
    prompt = columns.get("prompt")
    chat = _decode_chat(prompt) if isinstance(prompt, str) else prompt
    if not isinstance(chat, list):
        return
    parsed = [_parse_message(message) for message in chat]
    valid = [message for message in parsed if message is not None]
    text = last_user_text(valid)
    if len(valid) != len(chat) or text is None:
        raise TaskError(
            f"{where}: prompt={shorten(prompt)}; write text, or messages with a role and a text as "
            "content, of which at least one user message"
        )
    columns["prompt"] = text
    if len(valid) > 1:
        columns["messages"] = valid


def _is_prompt(messages: object) -> bool:
    """Chat messages that end with the user's: what follows would be the answer."""
    return (
        isinstance(messages, list | tuple)
        and len(messages) > 0
        and all(_parse_message(message) is not None for message in messages)
        and messages[-1]["role"] == "user"
    )


def _decode_chat(text: str) -> list[Any] | None:
    if text.lstrip()[:1] != "[":
        return None
    try:
        chat = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_chat = isinstance(chat, list) and chat and all(_has_role(message) for message in chat)
    return chat if is_chat else None


def _has_role(message: object) -> bool:
    return isinstance(message, dict) and message.keys() >= {"role", "content"}


def _parse_message(message: object) -> dict[str, str] | None:
    if not isinstance(message, Mapping):
        return None
    given = {name: value for name, value in message.items() if value is not None}
    is_valid = (
        given.get("role") in _ROLES
        and "content" in given
        and all(isinstance(value, str) for value in given.values())
    )
    return given if is_valid else None


def _read_env(columns: dict[str, Any], default_env_key: str | None) -> None:
    """Set `env_key` and `env_class` of rows in Fleet's, SkyRL's and the tau recipe's format."""
    env_class, source = columns.get("env_class"), columns.get("data_source")
    if not {"env_key", "env_id"} & columns.keys():
        env_key = _find_tau_domain(columns) or source or env_class or default_env_key
        if env_key is not None:
            columns["env_key"] = env_key
    in_fleet_table = env_class == "fleet_task" and source is not None
    if in_fleet_table:
        # Fleet's tables name this class in every row, whatever environment serves the tasks.
        del columns["env_class"]
    if in_fleet_table or "env_variable_keys" in columns:
        columns.pop("env_variable_keys", None)
        if source == columns.get("env_key", columns.get("env_id")):
            columns.pop("data_source", None)


def _find_tau_domain(columns: Mapping[str, Any]) -> str | None:
    """The domain of a tau row: its `data_source` is the same for all domains."""
    extra_info = columns.get("extra_info")
    is_tau = any(
        isinstance(name := columns.get(column), str) and name.startswith("tau")
        for column in ("env_class", "data_source")
    )
    domain = extra_info.get("domain") if is_tau and isinstance(extra_info, dict) else None
    return domain if isinstance(domain, str) else None


def _collect_metadata(columns: dict[str, Any], where: str) -> None:
    solution = columns.get("solution")
    if "solution" in columns and not _is_list_of_objects(solution):
        _add_to_metadata(columns, {"solution": columns.pop("solution")}, where)
    if not {"verifier_code", "verifier_func"}.isdisjoint(columns):
        for name in _FLEET_BOOKKEEPING:
            columns.pop(name, None)
    others = {name: columns.pop(name) for name in list(columns) if name not in FIELD_COLUMNS}
    _add_to_metadata(columns, others, where)


def _is_list_of_objects(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, dict) for one in value)


def _add_to_metadata(columns: dict[str, Any], others: Mapping[str, Any], where: str) -> None:
    metadata = columns.get("metadata", {})
    if not others or not isinstance(metadata, dict):
        return  # Task.model_validate rejects any other metadata.
    for name, value in others.items():
        if name in metadata and metadata[name] != value:
            raise TaskError(
                f"{where}: {name}={shorten(value)} and metadata.{name}={shorten(metadata[name])} "
                "differ; keep one"
            )
    columns["metadata"] = {**others, **metadata}


def _check_encodable(value: Any, where: str) -> None:
    """Pydantic rejects half a surrogate pair in its own fields, but not inside dicts."""
    try:
        json.dumps(value, ensure_ascii=False, default=repr).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start : error.end]
        raise TaskError(
            f"{where}; {half!r} is half a surrogate pair; write the whole character"
        ) from None


def _explain(problem: Mapping[str, Any]) -> str:
    field = ".".join(map(str, problem["loc"]))
    if problem["type"] == "missing":
        return f"{field} is missing; add it"
    return f"{field}={shorten(problem['input'])}; {problem['msg']}"


def _from_numpy(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form")
