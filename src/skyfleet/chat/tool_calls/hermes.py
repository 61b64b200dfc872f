"""Hermes tool calls: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen says them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from skyfleet.chat.message import ToolCall, ToolSpec
from skyfleet.chat.pieces import Mark
from skyfleet.chat.tool_calls.parser import Block, Parsed, marks, read_json_block, read_turn
from skyfleet.chat.tool_calls.strict_json import call_from, encode

_OPEN, _CLOSE = Mark("<tool_call>"), Mark("</tool_call>")
_MARKS = marks("<tool_call>|<function_call>")
_BOUNDARY = re.compile(r"</?(?:tool_call|function_call|think)>|<\|")


def parse_hermes(text: str, /, tools: Sequence[ToolSpec] = ()) -> Parsed:
    return read_turn(text, _MARKS, _read_block)


def write_hermes(calls: Sequence[ToolCall], /) -> Iterator[str]:
    for i, call in enumerate(calls):
        name, arguments = encode(call.name), encode(dict(call.arguments))
        yield from ("\n" if i else "", _OPEN)
        yield f'\n{{"name": {name}, "arguments": {arguments}}}\n'
        yield _CLOSE


def _read_block(text: str, tag: re.Match[str]) -> Block:
    closing = f"</{tag[0][1:]}"
    return read_json_block(
        text, tag.end(), call_from, closing=closing, boundary=_BOUNDARY, wrapper=1
    )
