"""Mutation testing: change one argument of one call of a reference solution to a wrong value."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

from skyfleet.chat.message import ToolSpec
from skyfleet.tasks.task import RecordedCall, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One argument of one reference call."""

    call_index: int
    tool: str
    name: str
    value: object
    schema: Mapping[str, Any]

    def mutate(self, task: Task, wrong: object) -> Task:
        """Return the task with this argument of its solution replaced by `wrong`."""
        calls = list(task.solution)
        call = calls[self.call_index]
        arguments = {**call.arguments, self.name: wrong}
        calls[self.call_index] = RecordedCall(name=call.name, arguments=arguments)
        return task.model_copy(update={"solution": tuple(calls)})

    def describe(self, wrong: object) -> str:
        """`update_issue(state='closed' -> 'open')`"""
        return f"{self.tool}({self.name}={self.value!r} -> {wrong!r})"

    def wrong_values(self, outputs: list[str]) -> Iterator[object]:
        """Yield an invented value, then values that occur in the tool outputs.

        `outputs` may grow in between. The last words come first, because an error message ends with
        the valid values.
        """
        invented = other_value(self.value, self.schema)
        if invented is None:
            return
        yield invented
        if isinstance(self.value, bool) or not isinstance(self.value, str | int):
            return
        kind, pattern = (int, r"\b\d{1,9}\b") if isinstance(self.value, int) else (str, r"[\w-]+")
        found = [
            kind(word) for text in reversed(outputs) for word in re.findall(pattern, text)[::-1]
        ]
        yield from (word for word in dict.fromkeys(found) if word not in (self.value, invented))


def writing_arguments(
    task: Task, tools: Mapping[str, ToolSpec], writing: frozenset[str] | None
) -> Iterator[Argument]:
    """Yield the arguments of writing calls, or of all calls if the writing tools are unknown."""
    for index, call in enumerate(task.solution):
        if writing is not None and call.name not in writing:
            continue
        schema = tools[call.name].parameters if call.name in tools else {}
        for name, value in call.arguments.items():
            yield Argument(
                call_index=index,
                tool=call.name,
                name=name,
                value=value,
                schema=schema.get("properties", {}).get(name, {}),
            )


def other_value(value: object, schema: Mapping[str, Any]) -> object:
    """Return a different value of the same type; None if there is none."""
    if choices := [one for one in schema.get("enum", ()) if one != value]:
        return choices[0]
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return _mutate_text(value)
        case list():
            schemas = dict.fromkeys(range(len(value)), schema.get("items", {}))
            mutated = _mutate_leaf(dict(enumerate(value)), schemas)
            return list(mutated.values()) if mutated else None
        case dict():
            return _mutate_leaf(value, schema.get("properties", {}))
    return None


def _mutate_leaf(
    values: Mapping[Any, object], schemas: Mapping[Any, Mapping[str, Any]]
) -> dict[Any, object] | None:
    """Change the first value that can be changed, at any depth; the others stay."""
    for key, value in values.items():
        if (wrong := other_value(value, schemas.get(key, {}))) is not None:
            return {**values, key: wrong}
    return None


def _mutate_text(text: str) -> str:
    if text.isdecimal():
        return str(int(text) + 1)
    try:
        return (date.fromisoformat(text) + timedelta(days=1)).isoformat()
    except (ValueError, OverflowError):
        # As a prefix, because some verifiers compare only the beginning.
        return f"zorqua {text}"
