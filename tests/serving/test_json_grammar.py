"""The grammar reads exactly the JSON texts of its schema, one character at a time."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from skyfleet.serving.json_grammar import JsonGrammar, UnsupportedSchemaError

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 2},
    },
    "required": ["name"],
    "additionalProperties": False,
}


def accepts(schema: Any, text: str) -> bool:
    grammar = JsonGrammar([("", "", schema)])
    return grammar.is_complete(grammar.read(text))


@pytest.mark.parametrize(
    "text",
    ['{"name": "Ann"}', '{"name":"A\\n\\u00e9","age":-7}', '{"name": "", "pets": ["cat", "dog"]}',
     '{"name": "a", "age": 0, "pets": []}'],
)  # fmt: skip
def test_texts_of_the_schema_are_read(text: str) -> None:
    json.loads(text)
    assert accepts(PERSON, text)


@pytest.mark.parametrize(
    "text",
    ["{}", '{"age": 1}', '{"name": 1}', '{"name": "a", "age": 01}', '{"name": "a", "x": 1}',
     '{"name": "a",}', '{"name": "a", "pets": ["cow"]}', '{"name": "a"', '{"name": "a\nb"}',
     '{"name": "a", "pets": ["cat", "cat", "cat"]}', '{"age": 1, "name": "a"}', '{"name":  "a"}'],
)  # fmt: skip
def test_other_texts_are_not_read(text: str) -> None:
    assert not accepts(PERSON, text)


def build_value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(7 if depth else 5)
    if kind == 5:
        return [build_value(rng, depth - 1) for _ in range(rng.randrange(3))]
    if kind == 6:
        return {f'k{i}"': build_value(rng, depth - 1) for i in range(rng.randrange(3))}
    return rng.choice([None, True, rng.random() * 1e9, -rng.randrange(99), 'é\t\\ "x', ""])


def test_any_object_that_python_writes_is_read_and_every_cut_of_it_is_not_complete() -> None:
    grammar = JsonGrammar([("", "", {"type": "object"})])
    for seed in range(60):
        text = json.dumps({"a": build_value(random.Random(seed), 3)}, ensure_ascii=bool(seed % 2))
        assert grammar.is_complete(grammar.read(text)), text
        assert not any(grammar.is_complete(grammar.read(text[:n])) for n in range(len(text)))


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"const": {"a": [1]}}, '{"a": [1]}', '{"a": [2]}'),
        ({"anyOf": [{"type": "null"}, {"type": "boolean"}]}, "null", "1"),
        ({"type": ["string", "null"]}, '"x"', "true"),
        ({"type": "array", "items": {"type": "number"}, "minItems": 2}, "[1, 2.5e3, 3]", "[1]"),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}},
         "[[], [[]]]", "[1]"),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, '{"a": 1}', '{"a": "1"}'),
        ({"type": "null", "title": "N", "description": "", "default": None, "x-order": 1},
         "null", "1"),
    ],
)  # fmt: skip
def test_keywords_mean_what_json_schema_says(schema: Any, good: str, bad: str) -> None:
    assert accepts(schema, good)
    assert not accepts(schema, bad)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "string", "pattern": "a+"}, "'pattern' is not supported"),
        ({"type": "object", "properties": {"a": {"minimum": 1}}}, "'minimum' is not supported"),
        ({"type": "array", "prefixItems": [{}]}, "'prefixItems' is not supported"),
        ({"type": "array", "unevaluatedItems": False}, "'unevaluatedItems' is not supported"),
        ({"type": "tuple"}, "the type 'tuple'"),
        ({"$ref": "#/$defs/x"}, "leads nowhere"),
        ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, "'b' is required"),
    ],
)
def test_a_schema_that_cannot_be_guaranteed_is_refused(schema: Any, reason: str) -> None:
    with pytest.raises(UnsupportedSchemaError, match=reason):
        JsonGrammar([("", "", schema)])


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"type": "object", "properties": {"x": {"$ref": "#/properties/x"}}},
        {"type": "array", "items": {"anyOf": [{"anyOf": [{"$ref": "#/items"}]}]}},
    ],
)
def test_a_schema_that_is_its_own_alternative_is_refused(schema: Any) -> None:
    with pytest.raises(UnsupportedSchemaError, match="refers to itself without a value between"):
        JsonGrammar([("", "", schema)])


def test_equal_alternatives_are_expanded_once() -> None:
    twice = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(60)}
    assert accepts({"$ref": "#/$defs/d0", "$defs": {**twice, "d60": {"type": "null"}}}, "null")


def test_alternatives_have_their_own_texts_around_the_value() -> None:
    grammar = JsonGrammar([("<a>", "</a>", {"type": "null"}), ("<b>", "", {"type": "boolean"})])
    assert grammar.is_complete(grammar.read("<a>null</a>"))
    assert grammar.is_complete(grammar.read("<b>true"))
    assert not grammar.read("<a>true")
