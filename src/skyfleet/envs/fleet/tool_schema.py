"""Shorten the JSON schemas of MCP tools before they enter a prompt, as FleetTaskEnv does.

Generated schemas repeat each name as a title, state defaults and write an optional value as a union
with null. None of it tells the agent which arguments it may send. What does is kept, even where
FleetTaskEnv drops it: definitions that are referred to, and unions of several types.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_DROPPED = ("title", "default")
_NAMED = ("properties", "$defs", "definitions")
"""Keywords whose values are schemas by name: a property may be called `title`."""
_LISTED = ("anyOf", "oneOf", "allOf")


def shorten_parameters(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a tool: the type, the properties and which of them are required."""
    shortened = _shorten(schema)
    parameters = {
        "type": "object",
        "properties": shortened.get("properties") or {},
        "required": list(shortened.get("required") or ()),
    }
    return parameters | {name: shortened[name] for name in _NAMED[1:] if shortened.get(name)}


def _shorten(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    shortened = {
        name: _shorten_keyword(name, value)
        for name, value in _drop_null(schema).items()
        if name not in _DROPPED
    }
    elements = shortened.get("prefixItems")
    if elements and "items" not in shortened and all(one == elements[0] for one in elements):
        shortened["items"] = elements[0]
        del shortened["prefixItems"]
    return shortened


def _shorten_keyword(name: str, value: Any) -> Any:
    if name in _NAMED and isinstance(value, Mapping):
        return {key: _shorten(one) for key, one in value.items()}
    if name in (*_LISTED, "prefixItems") and isinstance(value, list):
        return [_shorten(one) for one in value]
    return _shorten(value) if name in ("items", "additionalProperties") else value


def _drop_null(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """An argument that may be null may be left out; one remaining type needs no union."""
    union = schema.get("anyOf")
    if not isinstance(union, list):
        return schema
    types = [one for one in union if not (isinstance(one, Mapping) and one.get("type") == "null")]
    if len(types) == 1 and isinstance(types[0], Mapping):
        outer = {name: value for name, value in schema.items() if name != "anyOf"}
        return {**outer, **types[0]}
    return {**schema, "anyOf": types} if types else schema
