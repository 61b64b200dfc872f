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


def _allows_text(argument: object, schema: Mapping[str, Any]) -> bool:
    if not isinstance(argument, Mapping):
        return True
    found: list[bool] = []
    kind = argument.get("type")
    if isinstance(kind, str):
        found.append(kind == "string")
    elif isinstance(kind, Sequence):
        found.append("string" in kind)
    for union in ("anyOf", "oneOf"):
        found += [_allows_text(option, schema) for option in _listed(argument.get(union))]
    found += [isinstance(choice, str) for choice in _listed(argument.get("enum"))]
    if "const" in argument:
        found.append(isinstance(argument["const"], str))
    reference = argument.get("$ref")
    if isinstance(reference, str):
        found.append(_allows_text(_referred(reference, schema), schema))
    return any(found) or not found


def _listed(value: object) -> Sequence[object]:
    return value if isinstance(value, list | tuple) else ()


def _referred(reference: str, schema: Mapping[str, Any]) -> object:
    at: object = schema
    for step in reference.removeprefix("#/").split("/"):
        at = at.get(step) if isinstance(at, Mapping) else None
    return at
