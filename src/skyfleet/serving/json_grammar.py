"""A grammar of JSON texts, from a JSON schema, as a machine that reads one character at a time.

A state is a set of stacks of symbols that are still to be read. A one-character string is read as it
is; other symbols are classes of characters or expand into alternatives. Keys follow the order of the
schema, as in OpenAI's structured outputs, and the only white space is one optional space after `:` and
`,`, so that no text grows without end between two values.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

Symbol = str | tuple[Any, ...]
Stack = tuple[Symbol, ...]
State = frozenset[Stack]

_SUPPORTED = frozenset(
    [
        *(
            "type",
            "properties",
            "required",
            "additionalProperties",
            "items",
            "minItems",
            "maxItems",
        ),
        *("enum", "const", "anyOf", "$ref", "$defs", "definitions"),
    ]
)
_NOTES = frozenset(
    [
        *("title", "description", "default", "example", "examples", "deprecated", "readOnly"),
        *("writeOnly", "$schema", "$id", "$anchor", "$comment", "$vocabulary"),
        *("contentEncoding", "contentMediaType", "contentSchema"),
    ]
)
"""Keywords that demand nothing of a value; so do those that begin with `x-`."""
_TYPES = ("object", "array", "string", "number", "boolean", "null")
_CHARACTER, _DIGIT, _HEX, _NONZERO = ("character",), ("digit",), ("hex",), ("nonzero",)
_STRING, _DIGITS, _SPACE = ("string",), ("digits",), ("space",)
_MAX_OPTIONS = 1_000


class UnsupportedSchemaError(ValueError):
    """The grammar cannot express a schema."""


class JsonGrammar:
    """The texts before, of and after values of schemas, as alternatives of one another."""

    def __init__(self, alternatives: Sequence[tuple[str, str, Mapping[str, Any]]]) -> None:
        """Each alternative is the text before, the text after and the schema of a JSON value."""
        self._schemas: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = []
        self._numbers: dict[str, int] = {}
        self.start: State = frozenset(
            (*before, self._value(schema, schema), *after) for before, after, schema in alternatives
        )
        self._refuse_left_recursion()
        self.advance = lru_cache(maxsize=200_000)(self._advance)

    def _advance(self, state: State, character: str) -> State:
        """The state after one more character; empty if the grammar has no such text."""
        return frozenset(
            stack[1:]
            for one in state
            for stack in self._expand(one)
            if stack and _reads(stack[0], character)
        )

    def read(self, text: str) -> State:
        state = self.start
        for character in text:
            state = self.advance(state, character)
        return state

    def is_complete(self, state: State) -> bool:
        return any(not stack for one in state for stack in self._expand(one))

    def _expand(self, stack: Stack) -> Iterator[Stack]:
        """The stacks that begin with a character or a class, and the empty one."""
        pending, seen = [stack], set[Stack]()
        while pending:
            one = pending.pop()
            if one in seen:
                continue
            seen.add(one)
            if not one or isinstance(one[0], str) or one[0] in _CLASSES:
                yield one
            else:
                pending += [(*symbols, *one[1:]) for symbols in self._alternatives(one[0])]

    def _alternatives(self, symbol: tuple[Any, ...]) -> list[Stack]:
        match symbol:
            case ("string",):
                return [('"',), (_CHARACTER, _STRING), ("\\", ("escape",), _STRING)]
            case ("escape",):
                return [*((c,) for c in '"\\/bfnrt'), ("u", _HEX, _HEX, _HEX, _HEX)]
            case ("digits",):
                return [(), (_DIGIT, _DIGITS)]
            case ("space",):
                return [(), (" ",)]
            case ("integer",):
                positive: list[Stack] = [("0",), (_NONZERO, _DIGITS)]
                return positive + [("-", *stack) for stack in positive]
            case ("number",):
                exponent = (("exponent",),)
                return [(("integer",), ("fraction",), *exponent)]
            case ("fraction",):
                return [(), (".", _DIGIT, _DIGITS)]
            case ("exponent",):
                return [(), *((e, *sign, _DIGIT, _DIGITS) for e in "eE" for sign in ("", "+", "-"))]
            case ("value", number):
                return self._value_alternatives(number)
            case ("members", number, index, is_first):
                return self._members(number, index, is_first=is_first)
            case ("items", number, count):
                return self._items(number, count)
        raise AssertionError(symbol)

    def _value(self, schema: object, root: Mapping[str, Any]) -> tuple[Any, ...]:
        """The symbol of a schema, which is checked when it is first seen."""
        if isinstance(schema, bool):
            schema = {} if schema else {"enum": []}
        if not isinstance(schema, Mapping):
            raise UnsupportedSchemaError(f"{schema!r:.60} is not a schema")
        unknown = (str(key) for key in schema.keys() - _SUPPORTED - _NOTES)
        if unsupported := sorted(key for key in unknown if not key.startswith("x-")):
            raise UnsupportedSchemaError(f"the keyword {unsupported[0]!r} is not supported")
        key = json.dumps([schema, id(root)], sort_keys=True, default=str)
        if key not in self._numbers:
            self._numbers[key] = len(self._schemas)
            self._schemas.append((schema, root))
            self._check(self._numbers[key])
        return ("value", self._numbers[key])

    def _check(self, number: int) -> None:
        """Visit every part of the schema, so that what is not supported is found at once."""
        for stack in self._value_alternatives(number):
            for symbol in stack:
                if isinstance(symbol, tuple) and symbol[0] == "members":
                    properties = self._schemas[number][0].get("properties") or {}
                    for index in range(len(properties) + 1):
                        self._members(number, index, is_first=False)
                elif isinstance(symbol, tuple) and symbol[0] == "items":
                    self._items(number, 0)

    def _refuse_left_recursion(self) -> None:
        """A schema that is one of its own alternatives expands for ever and adds no text."""
        followed: dict[int, list[int]] = {
            number: [
                int(stack[0][1])
                for stack in self._value_alternatives(number)
                if stack and stack[0][0] == "value"
            ]
            for number in range(len(self._schemas))
        }
        for number in followed:
            pending, seen = list(followed[number]), set[int]()
            while pending:
                one = pending.pop()
                if one == number:
                    schema = json.dumps(self._schemas[number][0], default=str)
                    raise UnsupportedSchemaError(
                        f"the schema {schema:.60} refers to itself without a value between"
                    )
                if one not in seen:
                    seen.add(one)
                    pending += followed[one]

    def _value_alternatives(self, number: int) -> list[Stack]:
        schema, root = self._schemas[number]
        if "$ref" in schema:
            return [(self._value(_resolve(schema["$ref"], root), root),)]
        if "enum" in schema or "const" in schema:
            options = schema["enum"] if "enum" in schema else [schema["const"]]
            if len(options) > _MAX_OPTIONS:
                raise UnsupportedSchemaError(f"an enum has more than {_MAX_OPTIONS} values")
            return [tuple(json.dumps(option, ensure_ascii=False)) for option in options]
        if "anyOf" in schema:
            return [(self._value(option, root),) for option in schema["anyOf"]]
        kinds = schema.get("type", list(_TYPES))
        if "type" not in schema and "properties" in schema:
            kinds = "object"
        kinds = [kinds] if isinstance(kinds, str) else kinds
        return [stack for kind in kinds for stack in self._kind(kind, number)]

    def _kind(self, kind: str, number: int) -> list[Stack]:
        match kind:
            case "object":
                return [("{", ("members", number, 0, True))]
            case "array":
                return [("[", ("items", number, 0))]
            case "string":
                return [('"', _STRING)]
            case "integer" | "number":
                return [((kind,),)]
            case "boolean":
                return [tuple("true"), tuple("false")]
            case "null":
                return [tuple("null")]
        raise UnsupportedSchemaError(f"the type {kind!r:.40} is not supported")

    def _members(self, number: int, index: int, *, is_first: bool) -> list[Stack]:
        """The members from the property `index` on; a required one cannot be skipped."""
        schema, root = self._schemas[number]
        separator: Stack = () if is_first else (",", _SPACE)
        properties = schema.get("properties") or {}
        required = set(schema.get("required") or ())
        if missing := required - properties.keys():
            raise UnsupportedSchemaError(f"{min(missing)!r} is required and has no schema")
        if not properties:
            more = schema.get("additionalProperties", True)
            if more is False:
                return [("}",)]
            member = ('"', _STRING, ":", _SPACE, self._value(more, root))
            return [("}",), (*separator, *member, ("members", number, 0, False))]
        stacks: list[Stack] = []
        for at, key in enumerate(properties):
            if at >= index:
                name = json.dumps(key, ensure_ascii=False)
                value = self._value(properties[key], root)
                rest = ("members", number, at + 1, False)
                stacks.append((*separator, *name, ":", _SPACE, value, rest))
                if key in required:
                    return stacks
        return [*stacks, ("}",)]

    def _items(self, number: int, count: int) -> list[Stack]:
        schema, root = self._schemas[number]
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        stacks: list[Stack] = [("]",)] if count >= least else []
        if most is None or count < most:
            # Beyond the bounds the count makes no difference, and states stay few.
            after = min(count + 1, max(least, 1)) if most is None else count + 1
            separator: Stack = (",", _SPACE) if count else ()
            item = self._value(schema.get("items", {}), root)
            stacks.append((*separator, item, ("items", number, after)))
        return stacks


_CLASSES = frozenset([_CHARACTER, _DIGIT, _HEX, _NONZERO])


def _reads(symbol: Symbol, character: str) -> bool:
    if isinstance(symbol, str):
        return symbol == character
    if symbol == _CHARACTER:
        return character >= " " and character not in '"\\\ufffd'
    if symbol == _HEX:
        return character in "0123456789abcdefABCDEF"
    return character in ("123456789" if symbol == _NONZERO else "0123456789")


def _resolve(reference: str, root: Mapping[str, Any]) -> object:
    at: object = root
    for step in reference.removeprefix("#").split("/"):
        if step:
            at = at.get(step) if isinstance(at, Mapping) else None
    if not reference.startswith("#") or at is None:
        raise UnsupportedSchemaError(f"the reference {reference!r:.60} leads nowhere")
    return at
