"""Mutate: a reference solution with one argument of one call made wrong."""

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

    place: int
    tool: str
    name: str
    value: object
    schema: Mapping[str, Any]

    def changed(self, task: Task, wrong: object) -> Task:
        call = task.solution[self.place]
        mutated = RecordedCall(name=call.name, arguments={**call.arguments, self.name: wrong})
        calls = (*task.solution[: self.place], mutated, *task.solution[self.place + 1 :])
        return task.model_copy(update={"solution": calls})

    def told(self, wrong: object) -> str:
        """`update_issue(state='closed' -> 'open')`"""
        return f"{self.tool}({self.name}={self.value!r} -> {wrong!r})"

    def wrong_values(self, heard: list[str]) -> Iterator[object]:
        """One made up, then such as stand in `heard`, which may grow in between: the last said
        first, because a refusal ends with what would be right."""
        made_up = other_value(self.value, self.schema)
        if made_up is None:
            return
        yield made_up
        if isinstance(self.value, bool) or not isinstance(self.value, str | int):
            return
        kind, pattern = (int, r"\b\d{1,9}\b") if isinstance(self.value, int) else (str, r"[\w-]+")
        found = [kind(word) for text in reversed(heard) for word in re.findall(pattern, text)[::-1]]
        yield from (word for word in dict.fromkeys(found) if word not in (self.value, made_up))


def writing_arguments(
    task: Task, tools: Mapping[str, ToolSpec], writing: frozenset[str] | None
) -> Iterator[Argument]:
    """Of the calls that write; of every call where nobody says which do."""
    for place, call in enumerate(task.solution):
        if writing is not None and call.name not in writing:
            continue
        schema = tools[call.name].parameters if call.name in tools else {}
        for name, value in call.arguments.items():
            yield Argument(
                place=place,
                tool=call.name,
                name=name,
                value=value,
                schema=schema.get("properties", {}).get(name, {}),
            )


def other_value(value: object, schema: Mapping[str, Any]) -> object:
    """A value of the same kind that says something else; None where there is none."""
    if choices := [one for one in schema.get("enum", ()) if one != value]:
        return choices[0]
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return _other_text(value)
        case list():
            schemas = dict.fromkeys(range(len(value)), schema.get("items", {}))
            changed = _other_leaf(dict(enumerate(value)), schemas)
            return list(changed.values()) if changed else None
        case dict():
            return _other_leaf(value, schema.get("properties", {}))
    return None


def _other_leaf(
    values: Mapping[Any, object], schemas: Mapping[Any, Mapping[str, Any]]
) -> dict[Any, object] | None:
    """The first that can be said otherwise, however deep it lies; the others stay."""
    for key, value in values.items():
        if (wrong := other_value(value, schemas.get(key, {}))) is not None:
            return {**values, key: wrong}
    return None


def _other_text(text: str) -> str:
    if text.isdecimal():
        return str(int(text) + 1)
    try:
        return (date.fromisoformat(text) + timedelta(days=1)).isoformat()
    except (ValueError, OverflowError):
        # In front, because some verifiers compare only beginnings.
        return f"zorqua {text}"
