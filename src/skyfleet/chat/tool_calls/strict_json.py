"""Decode tool-call arguments strictly: exactly as the model wrote them, or not at all."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from skyfleet.chat.message import ToolCall, ToolSpec

CLOSING = {"{": "}", "[": "]", "(": ")"}
MAX_OPEN = 200
"""Python's own limit. A text that opens more is no call, and reading on would take long."""


def find_close(text: str, start: int, tokens: re.Pattern[str]) -> tuple[int | None, str]:
    """Where the bracket at `start` is closed; if the text ends before that, what is missing.

    `tokens` finds brackets and whole strings, so that a bracket inside a string is none.
    """
    expected: list[str] = []
    for token in tokens.finditer(text, start):
        if token[0] in CLOSING:
            expected.append(CLOSING[token[0]])
            if len(expected) > MAX_OPEN:
                return None, ""
        elif token[0] in CLOSING.values():
            if not expected or expected.pop() != token[0]:
                return None, ""
            if not expected:
                return token.end(), ""
    return None, "".join(reversed(expected))


UNREADABLE = (ValueError, RecursionError)
"""What reading a model's text may raise."""

MAX_MISSING = 3
"""Closing brackets that may be added to a block whose end is known."""
MAX_DEPTH = 100
"""Deeper values would break whoever writes them down with less of the stack left."""

NAME_KEYS = ("name", "tool")
ARGUMENT_KEYS = ("arguments", "parameters", "params")

_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[\]{}]', re.DOTALL)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key is given twice")
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_STRICT = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse)


def decode(text: str) -> Any:
    return _STRICT.decode(text)


def decode_at(text: str, position: int) -> tuple[Any, int]:
    """The value that begins at `position`, and where it ends."""
    return _STRICT.raw_decode(text, position)


def encode(value: object) -> str:
    """JSON as chat templates write it."""
    return json.dumps(value, ensure_ascii=False)


def decode_repaired(body: str, *, closed: bool, wrapper: int) -> Any:
    """The value `body` is once it has the closing brackets it lacks; at most one row of them fits.

    `closed` says the model ended the block. If it did not, more may have been to come, so only the
    last `wrapper` brackets, which hold nothing but finished arguments, may be added.
    """
    _, missing = find_close(body, 0, _TOKENS)
    cut_in_wrapper = len(missing) <= wrapper and body.rstrip().endswith("}")
    if not missing or not (len(missing) <= MAX_MISSING if closed else cut_in_wrapper):
        raise ValueError("more than closing brackets is missing")
    value = decode(body + missing)
    if not closed and isinstance(value, dict) and not value.keys() & set(ARGUMENT_KEYS):
        raise ValueError("the arguments may have been to come")
    return value


def call_from(value: object, *, needs_arguments: bool = False) -> ToolCall:
    """The call an object says, whichever of the usual keys it uses."""
    if not isinstance(value, dict):
        raise ValueError("a call is an object")
    names = [value[key] for key in NAME_KEYS if key in value]
    given = [value[key] for key in ARGUMENT_KEYS if key in value]
    if len(names) != 1 or len(given) > 1 or (needs_arguments and not given):
        raise ValueError("a call has one name and one object of arguments")
    arguments = given[0] if given else {}
    if isinstance(arguments, str):
        arguments = decode(arguments)
    return sound_call(names[0], arguments, id=value.get("id"))


def sound_call(name: object, arguments: object, *, id: object = None) -> ToolCall:
    """The call, if its name and arguments can be written down again."""
    if not isinstance(name, str) or not name.strip() or not isinstance(arguments, dict):
        raise ValueError("a call has a name and an object of arguments")
    if _deeper_than(arguments, MAX_DEPTH):
        raise ValueError(f"arguments are nested more than {MAX_DEPTH} deep")
    id = id if isinstance(id, str) else ""
    # 1e999, lone surrogates and endless integers pass a decoder but break whoever is called.
    json.dumps([id, name, arguments], ensure_ascii=False, allow_nan=False).encode()
    return ToolCall(id=id, name=name, arguments=arguments)


def _deeper_than(value: object, depth: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return depth == 0 or any(_deeper_than(item, depth - 1) for item in inner)


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
