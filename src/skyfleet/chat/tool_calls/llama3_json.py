"""Llama 3 JSON tool calls: `{"name": ..., "parameters": {...}}`, several of them with `;` between.

A `<|python_tag|>` may stand before them; what follows it is a call and nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from skyfleet.chat.message import ToolCall, ToolSpec
from skyfleet.chat.tool_calls.parser import SPECIAL, Block, Parsed, marks, read_turn, skip_space
from skyfleet.chat.tool_calls.strict_json import (
    ARGUMENT_KEYS,
    NAME_KEYS,
    UNREADABLE,
    call_from,
    decode,
    decode_repaired,
    encode,
)

_MARKS = marks(r"```(?:json)?\s*\{|\{")
_END_FENCE = re.compile(r"\s*```")
_BEGINS_A_CALL = re.compile(r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"(?:name|tool)"\s*:')
_BOUNDARY = re.compile(r"</?think>|<\|")
# Finds where an object ends even if what it holds is refused later.
_LOOSE = json.JSONDecoder(parse_int=str)


def parse_json_object(text: str, /, tools: Sequence[ToolSpec] = ()) -> Parsed:
    return read_turn(text, _MARKS, _read_block)


def write_json_object(calls: Sequence[ToolCall], /) -> Iterator[str]:
    yield "\n".join(
        encode({"name": call.name, "arguments": dict(call.arguments)}) for call in calls
    )


def read_object(text: str, start: int) -> Block:
    """The object that begins at `start`: a call, a failed call, or speech."""
    try:
        value, end = _LOOSE.raw_decode(text, start)
    except json.JSONDecodeError as error:
        if not _BEGINS_A_CALL.match(text, start):
            return Block(end=error.pos)
        return _read_broken(text, start)
    except RecursionError:
        begins_a_call = _BEGINS_A_CALL.match(text, start)
        return Block(end=_boundary(text, start), malformed=begins_a_call is not None)
    if not (value.keys() & set(NAME_KEYS) and value.keys() & set(ARGUMENT_KEYS)):
        return Block(end=end)
    try:
        return Block(end=end, calls=(call_from(decode(text[start:end])),))
    except UNREADABLE:
        return Block(end=end, malformed=True)


def _read_block(text: str, mark: re.Match[str]) -> Block:
    block = read_object(text, mark.end() - 1)
    fence = _END_FENCE.match(text, block.end) if mark[0].startswith("```") else None
    return replace(block, end=fence.end()) if fence else block


def _read_broken(text: str, start: int) -> Block:
    end = _boundary(text, start)
    cut = end == len(text) or text.startswith(SPECIAL, end)
    try:
        value = decode_repaired(text[start:end], closed=False, wrapper=1 if cut else 0)
        return Block(end=end, calls=(call_from(value),), repaired=True)
    except UNREADABLE:
        return Block(end=end, malformed=True)


def _boundary(text: str, start: int) -> int:
    stop = _BOUNDARY.search(text, start)
    return stop.start() if stop else len(text)


_TAG = "<|python_tag|>"
_TAG_MARKS = marks(rf"{re.escape(_TAG)}|\{{")
_SEPARATOR = re.compile(rf"\s*;(?=\s*(?:\{{|{re.escape(_TAG)}|\Z))")


def parse_llama3_json(text: str, /, tools: Sequence[ToolSpec] = ()) -> Parsed:
    return read_turn(text, _TAG_MARKS, _llama3_json_read_block)


def write_llama3_json(calls: Sequence[ToolCall], /) -> Iterator[str]:
    yield "; ".join(
        encode({"name": call.name, "parameters": dict(call.arguments)}) for call in calls
    )


def _llama3_json_read_block(text: str, mark: re.Match[str]) -> Block:
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
