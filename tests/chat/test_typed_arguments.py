"""Bare-text arguments get the type of the tool's schema, or stay text."""

from __future__ import annotations

from typing import Any

import pytest

from skyfleet.chat.message import ToolSpec
from skyfleet.chat.tool_calls.formats import get_parser

DEFINITIONS = {
    "Place": {"type": "object"},
    "Colour": {"enum": ["red", "blue"]},
    "Number": {"anyOf": [{"type": "number"}, {"$ref": "#/$defs/Numbers"}]},
    "Numbers": {"anyOf": [{"type": "array"}, {"$ref": "#/$defs/Number"}]},
    "Words": {"anyOf": [{"$ref": "#/$defs/Words"}, {"type": "string"}]},
}


def read(schema: dict[str, Any] | None, text: str, name: str) -> list[Any] | None:
    properties = {} if schema is None else {"a": schema}
    tool = ToolSpec(
        name="f", description="", parameters={"properties": properties, "$defs": DEFINITIONS}
    )
    sampled = {
        "qwen3_coder": f"<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>",
        "glm": f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
    }[name]
    parsed = get_parser(name)(sampled, tools=[tool])
    assert len(parsed.tool_calls) + len(parsed.malformed_calls) == 1
    return [call.arguments["a"] for call in parsed.tool_calls] or None


@pytest.mark.parametrize("name", ["qwen3_coder", "glm"])
@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (None, "5", "5"),
        ({}, "true", "true"),
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, '{"a": 1}', '{"a": 1}'),
        ({"type": "string"}, "\n two\nlines \n", "\n two\nlines \n"),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "5", "5"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"$ref": "#/$defs/Colour"}, "red", "red"),
        ({"$ref": "#/$defs/Unknown"}, "5", "5"),
        ({"allOf": [{"type": "string"}, {"minLength": 1}]}, "5", "5"),
        ({"$ref": "#/$defs/Words"}, "5", "5"),
        ({"type": "integer"}, "5", 5),
        ({"type": "number"}, " 1.5 ", 1.5),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "False", False),
        ({"type": ["integer", "null"]}, "None", None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5", 5),
        ({"type": "array"}, '["5", 5]', ["5", 5]),
        ({"$ref": "#/$defs/Place"}, '{"x": [1]}', {"x": [1]}),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": 1}, "1", 1),
        ({"allOf": [{"type": "integer"}]}, "5", 5),
        ({"allOf": [{"$ref": "#/$defs/Place"}], "description": "Where."}, '{"x": 1}', {"x": 1}),
        ({"type": "object", "anyOf": [{"required": ["x"]}]}, '{"x": 1}', {"x": 1}),
        ({"$ref": "#/$defs/Number"}, "5", 5),
    ],
)
def test_the_schema_determines_the_type_of_an_argument(
    name: str, schema: dict[str, Any] | None, text: str, value: object
) -> None:
    assert repr(read(schema, text, name)) == repr([value])


@pytest.mark.parametrize("name", ["qwen3_coder", "glm"])
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("integer", "five"),
        ("integer", ""),
        ("integer", "9" * 5000),
        ("number", "NaN"),
        ("object", '{"a": 1'),
        ("object", '{"a": 1, "a": 2}'),
        ("array", "[" * 100_000),
    ],
)
def test_an_argument_of_the_wrong_type_is_malformed(name: str, kind: str, text: str) -> None:
    assert read({"type": kind}, text, name) is None
