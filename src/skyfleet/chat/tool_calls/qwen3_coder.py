"""Qwen3-Coder tool calls, in a kind of XML; Qwen3.5 and Nemotron 3 say them too.

`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`, with one line
break on each side of a value that is not part of it. `</function>` ends a call: models often leave
out the `<tool_call>` around it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from skyfleet.chat.message import ToolCall, ToolSpec
from skyfleet.chat.pieces import Mark
from skyfleet.chat.tool_calls.parser import Block, Parsed, marks, read_turn, up_to
from skyfleet.chat.tool_calls.strict_json import UNREADABLE, bare_text, sound_call, typed_value

_OPEN, _CLOSE = Mark("<tool_call>"), Mark("</tool_call>")
_MARKS = marks(r"<tool_call>|<function=")
_FUNCTION = re.compile(r"(?:<tool_call>\s*)?<function=(?P<name>[^<>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=(?P<key>[^<>\n]+)>\n?")
_END = re.compile(r"\s*</function>(?:\s*</tool_call>)?")
_BOUNDARY = re.compile(r"</tool_call>|(?=<tool_call>|<function=|</?think>|<\|)")


def parse_qwen3_coder(text: str, /, tools: Sequence[ToolSpec] = ()) -> Parsed:
    return read_turn(text, _MARKS, partial(_read_block, tools))


def write_qwen3_coder(calls: Sequence[ToolCall], /) -> Iterator[str]:
    for i, call in enumerate(calls):
        yield from ("\n" if i else "", _OPEN, f"\n<function={call.name}>\n")
        for key, value in call.arguments.items():
            yield f"<parameter={key}>\n{bare_text(value)}\n</parameter>\n"
        yield from ("</function>\n", _CLOSE)


def _read_block(tools: Sequence[ToolSpec], text: str, mark: re.Match[str]) -> Block:
    position = mark.end()
    try:
        function = _FUNCTION.match(text, mark.start())
        if function is None:
            raise ValueError("a call names a function")
        name, position = function["name"].strip(), function.end()
        arguments: dict[str, Any] = {}
        while parameter := _PARAMETER.match(text, position):
            key = parameter["key"].strip()
            if key in arguments:
                raise ValueError(f"{key} is given twice")
            value, position = up_to(text, parameter.end(), "</parameter>")
            arguments[key] = typed_value(tools, name, key, value.removesuffix("\n"))
        end = _END.match(text, position)
        if end is None:
            raise ValueError("a call ends with its function")
        return Block(end=end.end(), calls=(sound_call(name, arguments),))
    except UNREADABLE:
        stop = _BOUNDARY.search(text, position)
        return Block(end=stop.end() if stop else len(text), malformed=True)
