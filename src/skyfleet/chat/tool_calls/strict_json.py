"""Decode the JSON of tool calls strictly: exactly as the model wrote it, or not at all."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from skyfleet.chat.message import ToolCall, ToolSpec

CLOSING = {"{": "}", "[": "]", "(": ")"}
MAX_OPEN = 200
"""Python's own limit. A text with more open brackets is not a call and would take long to scan."""


def find_closing_bracket(text: str, start: int, tokens: re.Pattern[str]) -> tuple[int | None, str]:
    """Where the bracket at `start` is closed; if the text ends before that, the missing brackets.

    `tokens` matches brackets and whole strings, so that brackets inside strings do not count.
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


PARSE_ERRORS = (ValueError, RecursionError)
"""What parsing model output may raise."""

MAX_MISSING = 3
"""How many closing brackets may be added to a block whose end is known."""
MAX_DEPTH = 100
"""Deeper values would exceed the recursion limit when serialized deeper in the stack."""

NAME_KEYS = ("name", "tool")
ARGUMENT_KEYS = ("arguments", "parameters", "params")

TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[\]{}]', re.DOTALL)


def reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key occurs twice")
    return value


def _reject_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_STRICT = json.JSONDecoder(object_pairs_hook=reject_duplicates, parse_constant=_reject_constant)


def decode(text: str) -> Any:
    return _STRICT.decode(text)


_FIRST_WINDOW = 256
_LONGEST_TOKEN = 16
"""Characters of a literal or an escape that the decoder may need to see behind an error."""


class DecodeError(ValueError):
    """Without the line of the error: `JSONDecodeError` counts lines from the start of the text."""

    def __init__(self, reason: str, position: int) -> None:
        super().__init__(f"{reason} at character {position}")
        self.position = position


def decode_at(text: str, position: int, decoder: json.JSONDecoder = _STRICT) -> tuple[Any, int]:
    """The value that begins at `position`, and the position of its end.

    The decoder gets windows of doubled size, so that an attempt costs as much as the text that it
    reads: many attempts in one long text, each with its own lines to count, would be quadratic.
    """
    size = _FIRST_WINDOW
    while True:
        is_whole = position + size >= len(text)
        try:
            value, end = decoder.raw_decode(text[position : position + size])
        except json.JSONDecodeError as error:
            # Where a string ends is behind its error, and perhaps behind the window.
            is_certain = error.pos + _LONGEST_TOKEN < size and "Unterminated" not in error.msg
            if is_whole or is_certain:
                raise DecodeError(error.msg, position + error.pos) from None
        else:
            if is_whole or end < size:
                return value, position + end
        size *= 2


def skip_open_brackets(text: str, start: int) -> int:
    """The position behind the first `MAX_OPEN` brackets that are open at once."""
    depth = 0
    for token in TOKENS.finditer(text, start):
        depth += 1 if token[0] in CLOSING else -1 if token[0] in CLOSING.values() else 0
        if depth > MAX_OPEN:
            return token.end()
    return len(text)


def encode(value: object) -> str:
    """JSON as chat templates write it."""
    return json.dumps(value, ensure_ascii=False)


def decode_repaired(body: str, *, closed: bool, wrapper: int) -> Any:
    """The value of `body` with its missing closing brackets added; only one sequence of them fits.

    `closed`: the model ended the block. If it did not, more text may have been intended, so only the
    last `wrapper` brackets, which enclose complete arguments, may be added.
    """
    _, missing = find_closing_bracket(body, 0, TOKENS)
    cut_in_wrapper = len(missing) <= wrapper and body.rstrip().endswith("}")
    if not missing or not (len(missing) <= MAX_MISSING if closed else cut_in_wrapper):
        raise ValueError("more than closing brackets is missing")
    value = decode(body + missing)
    if not closed and isinstance(value, dict) and not value.keys() & set(ARGUMENT_KEYS):
        raise ValueError("the arguments may be incomplete")
    return value


def parse_call(value: object, *, needs_arguments: bool = False) -> ToolCall:
    """The call in a JSON object with any of the usual keys."""
    if not isinstance(value, dict):
        raise ValueError("a call must be an object")
    names = [value[key] for key in NAME_KEYS if key in value]
    given = [value[key] for key in ARGUMENT_KEYS if key in value]
    if len(names) != 1 or len(given) > 1 or (needs_arguments and not given):
        raise ValueError("a call must have one name and one object of arguments")
    arguments = given[0] if given else {}
    if isinstance(arguments, str):
        arguments = decode(arguments)
    return make_tool_call(names[0], arguments, id=value.get("id"))


def make_tool_call(name: object, arguments: object, *, id: object = None) -> ToolCall:
    """The call, if its name and arguments can be serialized again; else ValueError."""
    if not isinstance(name, str) or not name.strip() or not isinstance(arguments, dict):
        raise ValueError("a call must have a name and an object of arguments")
    if _is_deeper_than(arguments, MAX_DEPTH):
        raise ValueError(f"arguments are nested more than {MAX_DEPTH} deep")
    id = id if isinstance(id, str) else ""
    # 1e999, lone surrogates and huge integers pass the decoder but cannot be serialized.
    json.dumps([id, name, arguments], ensure_ascii=False, allow_nan=False).encode()
    return ToolCall(id=id, name=name, arguments=arguments)


def _is_deeper_than(value: object, depth: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return depth == 0 or any(_is_deeper_than(item, depth - 1) for item in inner)


# Qwen3.5's template writes Python's spelling, and so do its models.
_PYTHON_CONSTANTS = {"True": "true", "False": "false", "None": "null"}


def coerce_value(tools: Sequence[ToolSpec], name: str, key: str, text: str) -> Any:
    """The value of argument `key` of tool `name`, written as bare text.

    If the schema allows a string, the text is the string; otherwise it is JSON, and ValueError is
    raised if it does not parse. An argument without a schema stays text: `5` may be a number or a
    room, and guessing would alter the call.
    """
    schema = next((tool.parameters for tool in tools if tool.name == name), {})
    properties = schema.get("properties")
    argument = properties.get(key) if isinstance(properties, Mapping) else None
    if _allows_string(argument, schema):
        return text
    bare = text.strip()
    return decode(_PYTHON_CONSTANTS.get(bare, bare))


def format_value(value: object) -> str:
    """The text from which `coerce_value` restores `value`."""
    return value if isinstance(value, str) else encode(value)


def _allows_string(
    argument: object, schema: Mapping[str, Any], seen: frozenset[str] = frozenset()
) -> bool:
    """Whether every keyword of the argument's schema allows a string; `seen` are visited `$ref`s."""
    if not isinstance(argument, Mapping):
        return True

    def allow(key: str) -> list[bool]:
        return [_allows_string(option, schema, seen) for option in _as_sequence(argument.get(key))]

    kind, reference = argument.get("type"), argument.get("$ref")
    allowed = allow("allOf")
    if isinstance(kind, str):
        allowed.append(kind == "string")
    if "const" in argument:
        allowed.append(isinstance(argument["const"], str))
    if isinstance(reference, str):
        # A cycle of references adds no type.
        inner = _resolve_reference(reference, schema)
        allowed.append(reference not in seen and _allows_string(inner, schema, seen | {reference}))
    types = [option == "string" for option in _as_sequence(kind)]
    enum = [isinstance(choice, str) for choice in _as_sequence(argument.get("enum"))]
    unions = (types, enum, allow("anyOf"), allow("oneOf"))
    return all(allowed) and all(any(union) for union in unions if union)


def _as_sequence(value: object) -> Sequence[object]:
    return value if isinstance(value, list | tuple) else ()


def _resolve_reference(reference: str, schema: Mapping[str, Any]) -> object:
    at: object = schema
    for step in reference.removeprefix("#/").split("/"):
        at = at.get(step) if isinstance(at, Mapping) else None
    return at
