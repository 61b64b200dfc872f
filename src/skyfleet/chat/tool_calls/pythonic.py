"""Pythonic tool calls: `[look_up(word="heron"), stop()]`, as Llama 3.2, Llama 4 and LFM2 say them.

Python's own grammar reads the list and only literals may stand in it. JSON's `true`, `false` and
`null` count as literals: LFM2's template writes nested values as JSON.
"""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Iterator, Sequence
from typing import Any

from skyfleet.chat.message import ToolCall, ToolSpec
from skyfleet.chat.tool_calls.parser import SPECIAL, Block, Parsed, marks, read_turn, skip_space
from skyfleet.chat.tool_calls.strict_json import MAX_MISSING, find_close, sound_call

_CLOSING = {"<|tool_call_start|>": "<|tool_call_end|>", "<|python_start|>": "<|python_end|>"}
_WORD = r"[^\W\d]\w*"
# Prose has brackets too: without a mark, only a first call with keywords or nothing is one.
_LIST = rf"\[(?=\s*{_WORD}(?:\.{_WORD})*\(\s*(?:\)|{_WORD}\s*=))"
_MARKS = marks("|".join([*map(re.escape, _CLOSING), _LIST]))
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


def parse_pythonic(text: str, /, tools: Sequence[ToolSpec] = ()) -> Parsed:
    return read_turn(text, _MARKS, _read_block)


def write_pythonic(calls: Sequence[ToolCall], /) -> Iterator[str]:
    yield "[" + ", ".join(map(_written, calls)) + "]"


def _written(call: ToolCall) -> str:
    arguments = ", ".join(f"{key}={value!r}" for key, value in call.arguments.items())
    return f"{call.name}({arguments})"


def _read_block(text: str, mark: re.Match[str]) -> Block:
    closing = _CLOSING.get(mark[0], "")
    start = skip_space(text, mark.end()) if closing else mark.start()
    end = find_close(text, start, _TOKENS)[0] if text.startswith("[", start) else None
    if end is not None:
        return _block(text[start:end], _past(text, end, closing))
    stop = _BOUNDARY.search(text, start)
    stopped = stop.start() if stop else len(text)
    end = _past(text, stopped, closing)
    try:
        cut = stop is None or stop[0] == SPECIAL
        body = _completed(text[start:stopped], closed=end > stopped, cut=cut)
    except ValueError:
        return Block(end=end, malformed=True)
    return _block(body, end, repaired=True)


def _past(text: str, position: int, closing: str) -> int:
    """Where the block ends: behind its closing mark, if that is what follows."""
    after = skip_space(text, position)
    return after + len(closing) if closing and text.startswith(closing, after) else position


def _completed(body: str, *, closed: bool, cut: bool) -> str:
    """`body` with the brackets it lacks; where the turn was cut, behind a finished call only."""
    _, missing = find_close(body, 0, _TOKENS)
    if not (0 < len(missing) <= MAX_MISSING if closed else cut and missing == "]"):
        raise ValueError("more than closing brackets is missing")
    return body + missing


def _block(body: str, end: int, *, repaired: bool = False) -> Block:
    try:
        return Block(end=end, calls=_calls(body), repaired=repaired)
    except _UNREADABLE:
        return Block(end=end, malformed=True)


def _calls(body: str) -> tuple[ToolCall, ...]:
    names = _QUOTED.sub("", body)
    # Python rewrites other letters in names, carriage returns and unknown escapes.
    if not names.isascii() or "\r" in body or _ODD_ESCAPE.search(body):
        raise ValueError("Python would read this otherwise than it is written")
    # `from` and `class` are fine names for a tool's argument, though not for Python's.
    body = _KEYWORD.sub(lambda found: found[0] + (_ESCAPED if found["word"] else ""), body)
    listed = ast.parse(body, mode="eval").body
    if not isinstance(listed, ast.List) or not listed.elts:
        raise ValueError("calls are a list")
    return tuple(_call(node) for node in listed.elts)


def _call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("a call has keyword arguments alone")
    arguments: dict[str, Any] = {}
    for given in node.keywords:
        key = (given.arg or "").removesuffix(_ESCAPED)
        if not key or key in arguments:
            raise ValueError("arguments are named, each once")
        arguments[key] = _literal(given.value)
    return sound_call(_dotted(node.func), arguments)


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    if not isinstance(node, ast.Name):
        raise ValueError("a call names its tool")
    return node.id


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return _pairs(keys, values)
    raise ValueError("arguments are literals")


def _pairs(keys: Sequence[ast.expr | None], values: Sequence[ast.expr]) -> dict[str, Any]:
    pairs: dict[str, Any] = {}
    for key, value in zip(keys, values, strict=True):
        if not (isinstance(key, ast.Constant) and isinstance(key.value, str)) or key.value in pairs:
            raise ValueError("keys are strings and given once")
        pairs[key.value] = _literal(value)
    return pairs
