"""Kimi K2 tool calls: a section of calls, each with its id and its JSON arguments.

`<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>{...}<|tool_call_end|>`: the id
names the tool, and the chat template repeats the id above the result.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from skyfleet.chat.call_ids import format_call_id
from skyfleet.chat.message import ToolCall, ToolSpec
from skyfleet.chat.tokenizer import SpecialToken
from skyfleet.chat.tool_calls.parser import (
    Block,
    ParsedTurn,
    compile_start_tags,
    parse_json_block,
    parse_turn,
)
from skyfleet.chat.tool_calls.strict_json import encode, make_tool_call

_SECTION = SpecialToken("<|tool_calls_section_begin|>")
_END_SECTION = SpecialToken("<|tool_calls_section_end|>")
_CALL, _END_CALL = SpecialToken("<|tool_call_begin|>"), SpecialToken("<|tool_call_end|>")
_ARGUMENTS = SpecialToken("<|tool_call_argument_begin|>")

_START_TAGS = compile_start_tags(rf"{re.escape(_SECTION)}|{re.escape(_CALL)}")
_ID = re.compile(r"(?:functions\.)?(?P<name>[^\s<|]+):\d+")
_HEADER = re.compile(rf"\s*(?P<id>{_ID.pattern})\s*{re.escape(_ARGUMENTS)}")
_FIRST_CALL = re.compile(rf"\s*{re.escape(_CALL)}")
_SECTION_END = re.compile(rf"\s*{re.escape(_END_SECTION)}")
_BOUNDARY = re.compile(r"</?think>|<\|tool_call(?:_begin|_end|s_section_begin|s_section_end)\|>")


def parse_kimi_k2(text: str, /, tools: Sequence[ToolSpec] = ()) -> ParsedTurn:
    return parse_turn(text, _START_TAGS, _parse_block)


def write_kimi_k2(calls: Sequence[ToolCall], /) -> Iterator[str]:
    yield _SECTION
    for i, call in enumerate(calls):
        own_id = _ID.fullmatch(call.id)
        id = call.id if own_id and own_id["name"] == call.name else format_call_id(call.name, i)
        yield from (_CALL, id, _ARGUMENTS, encode(dict(call.arguments)), _END_CALL)
    yield _END_SECTION


def _parse_block(text: str, start_tag: re.Match[str]) -> Block:
    first = _FIRST_CALL.match(text, start_tag.end()) if start_tag[0] == _SECTION else start_tag
    header = _HEADER.match(text, first.end()) if first else None
    if header is None:
        stop = _BOUNDARY.search(text, first.end() if first else start_tag.end())
        end = len(text) if stop is None else stop.start()
        end += len(_END_CALL) if stop and stop[0] == _END_CALL else 0
        return _include_section_end(text, Block(end=end, malformed=True))
    block = parse_json_block(
        text,
        header.end(),
        lambda arguments: make_tool_call(header["name"], arguments, id=header["id"]),
        closing=_END_CALL,
        boundary=_BOUNDARY,
        wrapper=0,
    )
    return _include_section_end(text, block)


def _include_section_end(text: str, block: Block) -> Block:
    end = _SECTION_END.match(text, block.end)
    return replace(block, end=end.end()) if end else block
