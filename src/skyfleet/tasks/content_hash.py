"""Hashes of what tasks say, equal in every process: whether two evaluations had the same tasks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from pydantic import BaseModel

from skyfleet.tasks.task import Task

_NAMES = {"key", "env_key"}
"""Fields that name a task; env_key of a Python object is the name of its run."""
_POSITION = {"index", "split"}
"""Where a row of SkyRL's format was in its file."""


def hash_content(task: Task) -> str:
    """Hash every field that the policy, the environment or the grade may depend on."""
    fields = {name: getattr(task, name) for name in Task.model_fields if name not in _NAMES}
    extra_info = task.metadata.get("extra_info")
    if isinstance(extra_info, Mapping):
        kept = {name: value for name, value in extra_info.items() if name not in _POSITION}
        fields["metadata"] = {**task.metadata, "extra_info": kept}
    return hash_value(canonicalize(fields))


def hash_task_set(tasks: Sequence[Task]) -> str:
    """Hash keys and contents, in whatever order the tasks are."""
    return hash_value(sorted([task.key, hash_content(task)] for task in tasks))


def hash_value(value: object) -> str:
    """The first 16 hexadecimal digits of the sha256 of a value that JSON can represent."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def describe_object(value: object) -> str:
    """An object's `repr`; only its type if that contains an address, which differs per process."""
    try:
        text = repr(value)
    except Exception:  # the user's class may raise anything
        text = " at 0x"
    return type(value).__qualname__ if " at 0x" in text else text


def canonicalize(value: Any, describe: Callable[[object], str] = describe_object) -> Any:
    """A JSON value that is equal for equal values; `describe` gives the text of other objects."""
    if value is None or isinstance(value, bool | int | str):
        return value if type(value) in (type(None), bool, int, str) else describe(value)
    if isinstance(value, float):
        return f"float {value!r}"
    if isinstance(value, BaseModel):
        value = dict(value)
    if isinstance(value, Mapping):
        items = ([canonicalize(k, describe), canonicalize(v, describe)] for k, v in value.items())
        return {"items": sorted(items, key=json.dumps)}
    if isinstance(value, Set):
        return {"set": sorted((canonicalize(one, describe) for one in value), key=json.dumps)}
    if isinstance(value, list | tuple):
        return [canonicalize(one, describe) for one in value]
    return describe(value)
