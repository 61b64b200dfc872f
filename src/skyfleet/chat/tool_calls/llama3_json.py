"""Llama 3 JSON tool calls: `{"name": ..., "parameters": {...}}`, separated by `;`.

`<|python_tag|>` may precede them; only a call may follow it. `json_object` is the plain format
`{"name": ..., "arguments": {...}}`, with or without a code fence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from skyfleet.chat.message import ToolCall, ToolSpec
from skyfleet.chat.tool_calls.parser import (
    SPECIAL,
    Block,
    ParsedTurn,
    compile_start_tags,
    parse_turn,
    skip_space,
)
from skyfleet.chat.tool_calls.strict_json import (
    ARGUMENT_KEYS,
    NAME_KEYS,
    PARSE_ERRORS,
    DecodeError,
    decode,
    decode_at,
    decode_repaired,
    encode,
    parse_call,
    skip_open_brackets,
)

_START_TAGS = compile_start_tags(r"```(?:json)?\s*\{|\{")
_FENCE_END = re.compile(r"\s*```")
_CALL_BEGINNING = re.compile(r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"(?:name|tool)"\s*:')
_BOUNDARY = re.compile(r"</?think>|<\|")
# Finds the end of an object even if its content is rejected later.
_LENIENT_DECODER = json.JSONDecoder(parse_int=str)


def parse_json_object(text: str, /, tools: Sequence[ToolSpec] = ()) -> ParsedTurn:
    return parse_turn(text, _START_TAGS, _parse_block)


def write_json_object(calls: Sequence[ToolCall], /) -> Iterator[str]:
    yield "\n".join(
        encode({"name": call.name, "arguments": dict(call.arguments)}) for call in calls
    )


def parse_object(text: str, start: int) -> Block:
    """The object that begins at `start`: a call, a malformed call, or text."""
    try:
        value, end = decode_at(text, start, _LENIENT_DECODER)
    except DecodeError as error:
        if not _CALL_BEGINNING.match(text, start):
            return Block(end=error.position)
        return _parse_broken(text, start)
    except RecursionError:
        begins_a_call = _CALL_BEGINNING.match(text, start)
        # Behind the brackets too, or each of them would be decoded to the same depth.
        end = max(_find_boundary(text, start), skip_open_brackets(text, start))
        return Block(end=end, malformed=begins_a_call is not None)
    if not (value.keys() & set(NAME_KEYS) and value.keys() & set(ARGUMENT_KEYS)):
        return Block(end=end)
    try:
        return Block(end=end, calls=(parse_call(decode(text[start:end])),))
    except PARSE_ERRORS:
        return Block(end=end, malformed=True)


def _parse_block(text: str, start_tag: re.Match[str]) -> Block:
    block = parse_object(text, start_tag.end() - 1)
    fence = _FENCE_END.match(text, block.end) if start_tag[0].startswith("```") else None
    return replace(block, end=fence.end()) if fence else block


def _parse_broken(text: str, start: int) -> Block:
    end = _find_boundary(text, start)
    cut = end == len(text) or text.startswith(SPECIAL, end)
    try:
        value = decode_repaired(text[start:end], closed=False, wrapper=1 if cut else 0)
        return Block(end=end, calls=(parse_call(value),), repaired=True)
    except PARSE_ERRORS:
        return Block(end=end, malformed=True)


def _find_boundary(text: str, start: int) -> int:
    stop = _BOUNDARY.search(text, start)
    return stop.start() if stop else len(text)


_TAG = "<|python_tag|>"
_TAGGED_STARTS = compile_start_tags(rf"{re.escape(_TAG)}|\{{")
_SEPARATOR = re.compile(rf"\s*;(?=\s*(?:\{{|{re.escape(_TAG)}|\Z))")


def parse_llama3_json(text: str, /, tools: Sequence[ToolSpec] = ()) -> ParsedTurn:
    return parse_turn(text, _TAGGED_STARTS, _parse_tagged_block)


def write_llama3_json(calls: Sequence[ToolCall], /) -> Iterator[str]:
    yield "; ".join(
        encode({"name": call.name, "parameters": dict(call.arguments)}) for call in calls
    )


def _parse_tagged_block(text: str, start_tag: re.Match[str]) -> Block:
    tagged = start_tag[0] == _TAG
    start = skip_space(text, start_tag.end()) if tagged else start_tag.start()
    block = parse_object(text, start) if text.startswith("{", start) else Block(end=start)
    if block.calls:
        separator = _SEPARATOR.match(text, block.end)
        return replace(block, end=separator.end()) if separator else block
    if tagged and not block.malformed:
        stop = _BOUNDARY.search(text, block.end)
        return Block(end=stop.start() if stop else len(text), malformed=True)
    return block
