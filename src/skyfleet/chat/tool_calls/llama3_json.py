"""Llama 3 JSON tool calls: `{"name": ..., "parameters": {...}}`, several of them with `;` between.

A `<|python_tag|>` may stand before them; what follows it is a call and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from skyfleet.chat.message import ToolCall, ToolSpec
from skyfleet.chat.tool_calls.blocks import Block, marks, read_turn, skip_space
from skyfleet.chat.tool_calls.json_object import read_object
from skyfleet.chat.tool_calls.parser import Parsed
from skyfleet.chat.tool_calls.strict_json import encode

_TAG = "<|python_tag|>"
_MARKS = marks(rf"{re.escape(_TAG)}|\{{")
_SEPARATOR = re.compile(rf"\s*;(?=\s*(?:\{{|{re.escape(_TAG)}|\Z))")
_BOUNDARY = re.compile(r"</?think>|<\|")


def parse_llama3_json(text: str, /, tools: Sequence[ToolSpec] = ()) -> Parsed:
    return read_turn(text, _MARKS, _read_block)


def write_llama3_json(calls: Sequence[ToolCall], /) -> Iterator[str]:
    yield "; ".join(
        encode({"name": call.name, "parameters": dict(call.arguments)}) for call in calls
    )


def _read_block(text: str, mark: re.Match[str]) -> Block:
    tagged = mark[0] == _TAG
    start = skip_space(text, mark.end()) if tagged else mark.start()
    block = read_object(text, start) if text.startswith("{", start) else Block(end=start)
    if block.calls:
        separator = _SEPARATOR.match(text, block.end)
        return replace(block, end=separator.end()) if separator else block
    if tagged and not block.malformed:
        stop = _BOUNDARY.search(text, block.end)
        return Block(end=stop.start() if stop else len(text), malformed=True)
    return block
