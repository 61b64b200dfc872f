"""JSON blocks: a call's JSON between two marks, the second of them optional.

JSON's own grammar says where a call ends: a mark inside an argument is part of that argument, and
one that opens something else needs no closing mark before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from skyfleet.chat.message import ToolCall
from skyfleet.chat.tool_calls.blocks import Block, skip_space
from skyfleet.chat.tool_calls.strict_json import UNREADABLE, decode_at, decode_repaired

SPECIAL = "<|"
"""How special tokens begin: where one stands in the text, the turn is over."""


def read_json_block(
    text: str,
    start: int,
    make_call: Callable[[Any], ToolCall],
    *,
    closing: str,
    boundary: re.Pattern[str],
    wrapper: int,
) -> Block:
    """The call whose JSON begins at `start`, or as much of the text as it spoils: to `boundary`.

    `wrapper` counts the brackets that hold the arguments.
    """
    start = skip_space(text, start)
    try:
        value, end = decode_at(text, start)
        end = _end_of_block(text, end, closing, boundary)
        return Block(end=end, calls=(make_call(value),))
    except UNREADABLE:
        stop = boundary.search(text, start)
    closed = stop is not None and stop[0] == closing
    cut = stop is None or stop[0] == SPECIAL
    body = text[start : stop.start()] if stop else text[start:]
    end = stop.end() if stop and closed else start + len(body)
    try:
        value = decode_repaired(body, closed=closed, wrapper=wrapper if cut else 0)
        return Block(end=end, calls=(make_call(value),), repaired=True)
    except UNREADABLE:
        return Block(end=end, malformed=True)


def _end_of_block(text: str, position: int, closing: str, boundary: re.Pattern[str]) -> int:
    position = skip_space(text, position)
    if text.startswith(closing, position):
        return position + len(closing)
    mark = boundary.match(text, position)
    opens = mark is not None and not mark[0].startswith("</")
    if position == len(text) or text.startswith(SPECIAL, position) or opens:
        return position
    raise ValueError("something follows the call")
