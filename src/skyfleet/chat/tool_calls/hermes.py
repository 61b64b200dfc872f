"""Hermes tool calls: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen writes them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from skyfleet.chat.message import ToolCall, ToolSpec
from skyfleet.chat.tokenizer import SpecialToken
from skyfleet.chat.tool_calls.parser import (
    Block,
    ParsedTurn,
    compile_start_tags,
    parse_json_block,
    parse_turn,
)
from skyfleet.chat.tool_calls.strict_json import encode, parse_call

_OPEN, _CLOSE = SpecialToken("<tool_call>"), SpecialToken("</tool_call>")
_START_TAGS = compile_start_tags("<tool_call>|<function_call>")
_BOUNDARY = re.compile(r"</?(?:tool_call|function_call|think)>|<\|")


def parse_hermes(text: str, /, tools: Sequence[ToolSpec] = ()) -> ParsedTurn:
    return parse_turn(text, _START_TAGS, _parse_block)


def write_hermes(calls: Sequence[ToolCall], /) -> Iterator[str]:
    for i, call in enumerate(calls):
        name, arguments = encode(call.name), encode(dict(call.arguments))
        yield from ("\n" if i else "", _OPEN)
        yield f'\n{{"name": {name}, "arguments": {arguments}}}\n'
        yield _CLOSE


def _parse_block(text: str, tag: re.Match[str]) -> Block:
    closing = f"</{tag[0][1:]}"
    return parse_json_block(
        text, tag.end(), parse_call, closing=closing, boundary=_BOUNDARY, wrapper=1
    )
