"""Mistral tool calls: `[TOOL_CALLS]name[ARGS]{...}` each, or, up to Nemo, one `[TOOL_CALLS][{...}]`.

Both are read; the newer is written. `[CALL_ID]` and an id may stand before the arguments.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from skyfleet.chat.message import ToolCall, ToolSpec
from skyfleet.chat.pieces import Mark
from skyfleet.chat.tool_calls.parser import SPECIAL, Block, Parsed, marks, read_turn, skip_space
from skyfleet.chat.tool_calls.strict_json import (
    UNREADABLE,
    call_from,
    decode_at,
    decode_repaired,
    encode,
    sound_call,
)

_CALLS, _ARGS = Mark("[TOOL_CALLS]"), Mark("[ARGS]")
_MARKS = marks(r"\[THINK\]|\[/THINK\]|\[TOOL_CALLS\]")
_HEADER = re.compile(
    r"(?P<name>[^\s\[\]{}<]+)\s*(?:\[CALL_ID\]\s*(?P<id>[^\s\[\]{}]+)\s*)?(?:\[ARGS\]\s*)?(?=\{)"
)
_BOUNDARY = re.compile(r"\[TOOL_CALLS\]|\[/?THINK\]|</?think>|<\|")


def parse_mistral(text: str, /, tools: Sequence[ToolSpec] = ()) -> Parsed:
    return read_turn(text, _MARKS, _read_block)


def write_mistral(calls: Sequence[ToolCall], /) -> Iterator[str]:
    for call in calls:
        yield from (_CALLS, call.name, _ARGS, encode(dict(call.arguments)))


def _read_block(text: str, mark: re.Match[str]) -> Block:
    start = skip_space(text, mark.end())
    header = _HEADER.match(text, start)
    if header:
        start = header.end()

    def calls_from(value: object) -> tuple[ToolCall, ...]:
        if header:
            return (sound_call(header["name"], value, id=header["id"]),)
        if not isinstance(value, list) or not value:
            raise ValueError("calls are a list")
        return tuple(call_from(item, needs_arguments=True) for item in value)

    try:
        value, end = decode_at(text, start)
        return Block(end=end, calls=calls_from(value))
    except UNREADABLE:
        stop = _BOUNDARY.search(text, start)
    end = stop.start() if stop else len(text)
    # The next call shows that this one was over; its arguments only lack brackets.
    closed = stop is not None and stop[0] == _CALLS
    cut = stop is None or stop[0] == SPECIAL
    wrapper = 2 if cut and not header else 0
    try:
        value = decode_repaired(text[start:end], closed=closed, wrapper=wrapper)
        return Block(end=end, calls=calls_from(value), repaired=True)
    except UNREADABLE:
        return Block(end=end, malformed=True)
