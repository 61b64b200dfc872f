"""Typed values: what an argument written as bare text means, by its tool's schema.

Where the schema allows a string, the text is the string; elsewhere it is JSON. An argument without
a schema stays text: `5` may be a number or a room, and guessing would alter the call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skyfleet.chat.message import ToolSpec
from skyfleet.chat.tool_calls.strict_json import decode, encode

# Qwen3.5's template writes these with Python's capitals, so its models do.
_PYTHON = {"True": "true", "False": "false", "None": "null"}


def typed_value(tools: Sequence[ToolSpec], name: str, key: str, text: str) -> Any:
    """The value of argument `key` of tool `name`; ValueError where its schema wants other text."""
    schema = next((tool.parameters for tool in tools if tool.name == name), {})
    properties = schema.get("properties")
    argument = properties.get(key) if isinstance(properties, Mapping) else None
    if _allows_text(argument, schema):
        return text
    bare = text.strip()
    return decode(_PYTHON.get(bare, bare))


def bare_text(value: object) -> str:
    """The text `typed_value` reads `value` from."""
    return value if isinstance(value, str) else encode(value)


def _allows_text(
    argument: object, schema: Mapping[str, Any], seen: frozenset[str] = frozenset()
) -> bool:
    """Whether every keyword of the argument's schema lets a string through; `seen` are `$ref`s."""
    if not isinstance(argument, Mapping):
        return True

    def allow(key: str) -> list[bool]:
        return [_allows_text(option, schema, seen) for option in _listed(argument.get(key))]

    kind, reference = argument.get("type"), argument.get("$ref")
    allowed = allow("allOf")
    if isinstance(kind, str):
        allowed.append(kind == "string")
    if "const" in argument:
        allowed.append(isinstance(argument["const"], str))
    if isinstance(reference, str):
        # A circle of references adds no type of its own.
        inner = _referred(reference, schema)
        allowed.append(reference not in seen and _allows_text(inner, schema, seen | {reference}))
    types = [option == "string" for option in _listed(kind)]
    enum = [isinstance(choice, str) for choice in _listed(argument.get("enum"))]
    unions = (types, enum, allow("anyOf"), allow("oneOf"))
    return all(allowed) and all(any(union) for union in unions if union)


def _listed(value: object) -> Sequence[object]:
    return value if isinstance(value, list | tuple) else ()


def _referred(reference: str, schema: Mapping[str, Any]) -> object:
    at: object = schema
    for step in reference.removeprefix("#/").split("/"):
        at = at.get(step) if isinstance(at, Mapping) else None
    return at
