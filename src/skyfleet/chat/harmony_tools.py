"""Harmony tools: the TypeScript in which gpt-oss is told what it can call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from skyfleet.chat.message import ToolSpec

Schema = Mapping[str, Any]

_SIMPLE = {"number": "number", "integer": "number", "boolean": "boolean"}
_LONGEST_ITEM = 50
"""Characters; the type of a list whose items take more is any[]."""
_INDENT = "\n" + " " * 16
"""What the template lets stand before the type of an object's field: the model knows it so."""


def harmony_tools(tools: Sequence[ToolSpec]) -> str:
    functions = "".join(map(_function, tools))
    return f"## functions\n\nnamespace functions {{\n\n{functions}}} // namespace functions"


def _function(tool: ToolSpec) -> str:
    properties: Mapping[str, Schema] = tool.parameters.get("properties") or {}
    head = f"// {tool.description}\ntype {tool.name} = "
    if not properties:
        return f"{head}() => any;\n\n"
    required = tool.parameters.get("required") or ()
    parameters = "".join(
        _parameter(name, schema, name in required) for name, schema in properties.items()
    )
    return f"{head}(_: {{\n{parameters}}}) => any;\n\n"


def _parameter(name: str, schema: Schema, is_required: bool) -> str:
    comment = f"// {schema['description']}\n" if schema.get("description") else ""
    return f"{comment}{name}{'' if is_required else '?'}: {_type(schema)}{_default(schema)},\n"


def _default(schema: Schema) -> str:
    if "default" not in schema:
        return ""
    default = schema["default"]
    if schema.get("oneOf"):
        return f"// default: {default}"
    written = default if schema.get("enum") else json.dumps(default, ensure_ascii=False)
    return f", // default: {written}"


def _type(schema: Schema) -> str:
    kind, null = schema.get("type"), " | null" if schema.get("nullable") else ""
    if kind == "array":
        return f"{_item(schema.get('items') or {})}[]{null}"
    if isinstance(kind, list) and kind:
        return " | ".join(kind)
    if schema.get("oneOf"):
        return " | \n".join(map(_variant, schema["oneOf"]))
    if kind == "string":
        enum = schema.get("enum")
        return " | ".join(f'"{choice}"' for choice in enum) if enum else f"string{null}"
    if kind == "object":
        return _object(schema)
    return _SIMPLE.get(str(kind), "any")


def _item(schema: Schema) -> str:
    # The choices of a text are left out, inside a list.
    written = "string" if schema.get("type") == "string" else _type(schema)
    return "any" if len(written) > _LONGEST_ITEM or written == "object | object" else written


def _variant(schema: Schema) -> str:
    description = schema.get("description")
    return _type(schema) + (f"// {description}" if description else "")


def _object(schema: Schema) -> str:
    properties: Mapping[str, Schema] = schema.get("properties") or {}
    required = schema.get("required") or ()
    fields = (
        f"{name}{'' if name in required else '?'}: {_INDENT}{_type(inner)}"
        for name, inner in properties.items()
    )
    return f"{{\n{', '.join(fields)}}}" if properties else "object"
