"""GLM-4 tool calls: a name, then keys and values in tags of their own.

`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`, with line breaks
between the tags up to GLM-4.6. Only `</tool_call>` says that no argument was to follow.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from skyfleet.chat.message import ToolCall, ToolSpec
from skyfleet.chat.pieces import Mark
from skyfleet.chat.tool_calls.parser import Block, Parsed, marks, read_turn, skip_space, up_to
from skyfleet.chat.tool_calls.strict_json import UNREADABLE, bare_text, sound_call, typed_value

_OPEN, _CLOSE = Mark("<tool_call>"), Mark("</tool_call>")
_KEY, _END_KEY = Mark("<arg_key>"), Mark("</arg_key>")
_VALUE, _END_VALUE = Mark("<arg_value>"), Mark("</arg_value>")

_MARKS = marks("<tool_call>")
_NAME = re.compile(r"\s*(?P<name>[^\s<>]+)\s*")
_ARGUMENT = re.compile(r"<arg_key>(?P<key>[^<>]+)</arg_key>\s*<arg_value>")
_BOUNDARY = re.compile(r"</tool_call>|(?=<tool_call>|</?think>|<\|)")


def parse_glm(text: str, /, tools: Sequence[ToolSpec] = ()) -> Parsed:
    return read_turn(text, _MARKS, partial(_read_block, tools))


def write_glm(calls: Sequence[ToolCall], /) -> Iterator[str]:
    for i, call in enumerate(calls):
        yield from ("\n" if i else "", _OPEN, f"{call.name}\n")
        for key, value in call.arguments.items():
            yield from (_KEY, key, _END_KEY, "\n", _VALUE, bare_text(value), _END_VALUE, "\n")
        yield _CLOSE


def _read_block(tools: Sequence[ToolSpec], text: str, mark: re.Match[str]) -> Block:
    position = mark.end()
    try:
        head = _NAME.match(text, position)
        if head is None:
            raise ValueError("a call begins with a name")
        name, position = head["name"], head.end()
        arguments: dict[str, Any] = {}
        while argument := _ARGUMENT.match(text, position):
            key = argument["key"].strip()
            if key in arguments:
                raise ValueError(f"{key} is given twice")
            value, position = up_to(text, argument.end(), _END_VALUE)
            arguments[key] = typed_value(tools, name, key, value)
            position = skip_space(text, position)
        if not text.startswith(_CLOSE, position):
            raise ValueError("a call ends with its tag")
        return Block(end=position + len(_CLOSE), calls=(sound_call(name, arguments),))
    except UNREADABLE:
        stop = _BOUNDARY.search(text, position)
        return Block(end=stop.end() if stop else len(text), malformed=True)
