"""Hermes tool calls: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen says them.

The text is read once, left to right, and JSON's own grammar says where a call ends: a tag inside
an argument is part of that argument, and a call inside a thought is part of that thought.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from skyfleet.chat.message import ToolCall
from skyfleet.chat.tool_calls.parser import Parsed

THINK, END_THINK = "<think>", "</think>"
MAX_MISSING_BRACES = 3

_TAG = re.compile(r"<(?:tool_call|function_call|think|/think)>")
_BOUNDARY = re.compile(r"</?(?:tool_call|function_call|think)>|<\|")
_SPACE = re.compile(r"[ \t\r\n]*")
_JSON = json.JSONDecoder()
_UNREADABLE = (ValueError, RecursionError)
_Call = tuple[str, dict[str, Any]]


def parse_hermes(text: str) -> Parsed:
    """Split `text` into thought, speech, calls, and what tried to be a call. Never raises.

    A `</think>` that nothing opened closes a thought the chat template opened: all before it is
    reasoning. A thought that is never closed lasts to the end of the text.
    """
    thoughts: list[str] = []
    speech: list[str] = []
    blocks: list[_Block] = []
    position = 0
    while tag := _TAG.search(text, position):
        speech.append(text[position : tag.start()])
        position = tag.end()
        if tag[0] == THINK:
            close = text.find(END_THINK, position)
            thoughts.append(text[position:] if close < 0 else text[position:close])
            position = len(text) if close < 0 else close + len(END_THINK)
        elif tag[0] != END_THINK:
            blocks.append(_read_block(text, tag))
            position = blocks[-1].end
        elif not thoughts:
            thoughts.append(text[: tag.start()])
            speech.clear()
            blocks.clear()
    speech.append(text[position:])
    calls = [block.call for block in blocks if block.call]
    return Parsed(
        content=_joined(speech),
        reasoning=_joined(thoughts) if thoughts else None,
        tool_calls=tuple(
            ToolCall(id=f"call_{i}", name=name, arguments=arguments)
            for i, (name, arguments) in enumerate(calls)
        ),
        malformed_calls=tuple(block.text for block in blocks if not block.call),
        repaired_calls=sum(block.repaired for block in blocks),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    text: str
    end: int
    call: _Call | None
    """None: malformed."""
    repaired: bool = False


def _read_block(text: str, tag: re.Match[str]) -> _Block:
    """The call that `tag` opens, or as much of the text as it spoils."""
    closing = f"</{tag[0][1:]}"
    start = _skip_space(text, tag.end())
    try:
        value, end = _JSON.raw_decode(text, start)
        end = _end_of_block(text, end, closing)
        return _Block(text=text[tag.start() : end], end=end, call=_call_from(value))
    except _UNREADABLE:
        boundary = _BOUNDARY.search(text, start)
    if boundary is None or boundary[0] != closing:
        # It may have been cut short, and adding braces would guess at what was to come.
        end = boundary.start() if boundary else len(text)
        return _Block(text=text[tag.start() : end], end=end, call=None)
    call = _repair(text[start : boundary.start()])
    end = boundary.end()
    return _Block(text=text[tag.start() : end], end=end, call=call, repaired=call is not None)


def _repair(body: str) -> _Call | None:
    """The call `body` is once it has the braces it lacks; at most one number of them fits."""
    for missing in range(1, MAX_MISSING_BRACES + 1):
        try:
            return _call_from(_JSON.decode(body + "}" * missing))
        except _UNREADABLE:
            continue
    return None


def _skip_space(text: str, position: int) -> int:
    space = _SPACE.match(text, position)
    return space.end() if space else position


def _end_of_block(text: str, position: int, closing: str) -> int:
    position = _skip_space(text, position)
    if text.startswith(closing, position):
        return position + len(closing)
    if position == len(text) or text.startswith("<|", position):
        return position
    raise ValueError("something follows the call")


def _call_from(value: object) -> _Call:
    """Name and arguments, both such that they can be written down again."""
    if not isinstance(value, dict):
        raise ValueError("a call is an object")
    name = value.get("name", value.get("tool"))
    arguments = value.get("arguments", value.get("params", {}))
    if isinstance(arguments, str):
        arguments = _JSON.decode(arguments)
    if not isinstance(name, str) or not name.strip() or not isinstance(arguments, dict):
        raise ValueError("a call has a name and an object of arguments")
    # NaN, Infinity, 1e999 and lone surrogates pass the decoder but would break whoever is called.
    json.dumps([name, arguments], ensure_ascii=False, allow_nan=False).encode()
    return name, arguments


def _joined(pieces: list[str]) -> str:
    return "\n".join(filter(None, map(str.strip, pieces)))
