"""Mistral tool calls: `[TOOL_CALLS]name[ARGS]{...}` each, or, up to Nemo, one `[TOOL_CALLS][{...}]`.

The parser reads both, the writer writes the newer. `[CALL_ID]` and an id may precede the arguments.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from skyfleet.chat.message import ToolCall, ToolSpec
from skyfleet.chat.tokenizer import SpecialToken
from skyfleet.chat.tool_calls.parser import (
    SPECIAL,
    Block,
    ParsedTurn,
    compile_start_tags,
    parse_turn,
    skip_space,
)
from skyfleet.chat.tool_calls.strict_json import (
    PARSE_ERRORS,
    decode_at,
    decode_repaired,
    encode,
    make_tool_call,
    parse_call,
)

_CALLS, _ARGS = SpecialToken("[TOOL_CALLS]"), SpecialToken("[ARGS]")
_START_TAGS = compile_start_tags(r"\[THINK\]|\[/THINK\]|\[TOOL_CALLS\]")
_HEADER = re.compile(
    r"(?P<name>[^\s\[\]{}<]+)\s*(?:\[CALL_ID\]\s*(?P<id>[^\s\[\]{}]+)\s*)?(?:\[ARGS\]\s*)?(?=\{)"
)
_BOUNDARY = re.compile(r"\[TOOL_CALLS\]|\[/?THINK\]|</?think>|<\|")


def parse_mistral(text: str, /, tools: Sequence[ToolSpec] = ()) -> ParsedTurn:
    return parse_turn(text, _START_TAGS, _parse_block)


def write_mistral(calls: Sequence[ToolCall], /) -> Iterator[str]:
    for call in calls:
        yield from (_CALLS, call.name, _ARGS, encode(dict(call.arguments)))


def _parse_block(text: str, start_tag: re.Match[str]) -> Block:
    start = skip_space(text, start_tag.end())
    header = _HEADER.match(text, start)
    if header:
        start = header.end()

    def build_calls(value: object) -> tuple[ToolCall, ...]:
        if header:
            return (make_tool_call(header["name"], value, id=header["id"]),)
        if not isinstance(value, list) or not value:
            raise ValueError("calls must be a list")
        return tuple(parse_call(item, needs_arguments=True) for item in value)

    try:
        value, end = decode_at(text, start)
        return Block(end=end, calls=build_calls(value))
    except PARSE_ERRORS:
        stop = _BOUNDARY.search(text, start)
    end = stop.start() if stop else len(text)
    # The next call shows that this one is complete; only closing brackets may be missing.
    closed = stop is not None and stop[0] == _CALLS
    cut = stop is None or stop[0] == SPECIAL
    wrapper = 2 if cut and not header else 0
    try:
        value = decode_repaired(text[start:end], closed=closed, wrapper=wrapper)
        return Block(end=end, calls=build_calls(value), repaired=True)
    except PARSE_ERRORS:
        return Block(end=end, malformed=True)
