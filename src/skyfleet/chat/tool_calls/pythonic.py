"""Pythonic tool calls: `[look_up(word="heron"), stop()]`, as Llama 3.2, Llama 4 and LFM2 write them.

Python's own grammar parses the list, and arguments must be literals. JSON's `true`, `false` and
`null` count as literals: LFM2's template writes nested values as JSON.
"""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Iterator, Sequence
from typing import Any

from skyfleet.chat.message import ToolCall, ToolSpec
from skyfleet.chat.tool_calls.parser import (
    SPECIAL,
    Block,
    ParsedTurn,
    compile_start_tags,
    parse_turn,
    skip_space,
)
from skyfleet.chat.tool_calls.strict_json import MAX_MISSING, find_closing_bracket, make_tool_call

_CLOSING = {"<|tool_call_start|>": "<|tool_call_end|>", "<|python_start|>": "<|python_end|>"}
_WORD = r"[^\W\d]\w*"
# Text has brackets too: without a tag the first call must have keyword arguments or none.
_LIST = rf"\[(?=\s*{_WORD}(?:\.{_WORD})*\(\s*(?:\)|{_WORD}\s*=))"
_START_TAGS = compile_start_tags("|".join([*map(re.escape, _CLOSING), _LIST]))
_BOUNDARY = re.compile(r"</?think>|<\|")
_STRING = (
    r"'''(?:[^\\]|\\.)*?(?:'''|\Z)|\"\"\"(?:[^\\]|\\.)*?(?:\"\"\"|\Z)"
    r"|'(?:[^'\\\n]|\\.)*'?|\"(?:[^\"\\\n]|\\.)*\"?"
)
_QUOTED = re.compile(_STRING, re.DOTALL)
_TOKENS = re.compile(rf"{_STRING}|[\[\](){{}}]", re.DOTALL)
_KEYWORD = re.compile(rf"{_STRING}|\b(?P<word>{'|'.join(keyword.kwlist)})(?=\s*=[^=])", re.DOTALL)
_ESCAPED = "__skyfleet_keyword"
_ODD_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*\\(?:[^\n\\'\"abfnrtv0-7xNuU]|[4-7][0-7]{2})")
_JSON_NAMES = {"true": True, "false": False, "null": None}
_UNREADABLE = (ValueError, SyntaxError, RecursionError, MemoryError)


def parse_pythonic(text: str, /, tools: Sequence[ToolSpec] = ()) -> ParsedTurn:
    return parse_turn(text, _START_TAGS, _parse_block)


def write_pythonic(calls: Sequence[ToolCall], /) -> Iterator[str]:
    yield "[" + ", ".join(map(_format_call, calls)) + "]"


def _format_call(call: ToolCall) -> str:
    arguments = ", ".join(f"{key}={value!r}" for key, value in call.arguments.items())
    return f"{call.name}({arguments})"


def _parse_block(text: str, start_tag: re.Match[str]) -> Block:
    closing = _CLOSING.get(start_tag[0], "")
    start = skip_space(text, start_tag.end()) if closing else start_tag.start()
    end = find_closing_bracket(text, start, _TOKENS)[0] if text.startswith("[", start) else None
    if end is not None:
        return _build_block(text[start:end], _skip_closing(text, end, closing))
    stop = _BOUNDARY.search(text, start)
    stopped = stop.start() if stop else len(text)
    end = _skip_closing(text, stopped, closing)
    try:
        cut = stop is None or stop[0] == SPECIAL
        body = _add_missing_brackets(text[start:stopped], closed=end > stopped, cut=cut)
    except ValueError:
        return Block(end=end, malformed=True)
    return _build_block(body, end, repaired=True)


def _skip_closing(text: str, position: int, closing: str) -> int:
    """The end of the block: behind its closing tag, if that follows."""
    after = skip_space(text, position)
    return after + len(closing) if closing and text.startswith(closing, after) else position


def _add_missing_brackets(body: str, *, closed: bool, cut: bool) -> str:
    """`body` with its missing closing brackets; if the turn was cut, only behind a complete call."""
    _, missing = find_closing_bracket(body, 0, _TOKENS)
    if not (0 < len(missing) <= MAX_MISSING if closed else cut and missing == "]"):
        raise ValueError("more than closing brackets is missing")
    return body + missing


def _build_block(body: str, end: int, *, repaired: bool = False) -> Block:
    try:
        return Block(end=end, calls=_parse_calls(body), repaired=repaired)
    except _UNREADABLE:
        return Block(end=end, malformed=True)


def _parse_calls(body: str) -> tuple[ToolCall, ...]:
    names = _QUOTED.sub("", body)
    # Python normalizes non-ASCII names, carriage returns and unknown escapes.
    if not names.isascii() or "\r" in body or _ODD_ESCAPE.search(body):
        raise ValueError("Python would not parse this literally")
    # A tool's argument may be named `from` or `class`, which are keywords in Python.
    body = _KEYWORD.sub(lambda match: match[0] + (_ESCAPED if match["word"] else ""), body)
    listed = ast.parse(body, mode="eval").body
    if not isinstance(listed, ast.List) or not listed.elts:
        raise ValueError("calls must be a non-empty list")
    return tuple(_parse_node(node) for node in listed.elts)


def _parse_node(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("a call must have keyword arguments only")
    arguments: dict[str, Any] = {}
    for argument in node.keywords:
        key = (argument.arg or "").removesuffix(_ESCAPED)
        if not key or key in arguments:
            raise ValueError("each argument must be named, and once")
        arguments[key] = _parse_literal(argument.value)
    return make_tool_call(_parse_name(node.func), arguments)


def _parse_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_parse_name(node.value)}.{node.attr}"
    if not isinstance(node, ast.Name):
        raise ValueError("a call must name its tool")
    return node.id


def _parse_literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_parse_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return _parse_dict(keys, values)
    raise ValueError("arguments must be literals")


def _parse_dict(keys: Sequence[ast.expr | None], values: Sequence[ast.expr]) -> dict[str, Any]:
    pairs: dict[str, Any] = {}
    for key, value in zip(keys, values, strict=True):
        if not (isinstance(key, ast.Constant) and isinstance(key.value, str)) or key.value in pairs:
            raise ValueError("keys must be strings, each used once")
        pairs[key.value] = _parse_literal(value)
    return pairs
