"""Qwen3-Coder tool calls in XML-like tags; Qwen3.5 and Nemotron 3 write them too.

`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`, with one line
break on each side of a value that does not belong to it. `</function>` ends a call: models often
omit the `<tool_call>` around it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from skyfleet.chat.message import ToolCall, ToolSpec
from skyfleet.chat.tokenizer import SpecialToken
from skyfleet.chat.tool_calls.parser import (
    Block,
    ParsedTurn,
    compile_start_tags,
    parse_turn,
    read_until,
)
from skyfleet.chat.tool_calls.strict_json import (
    PARSE_ERRORS,
    coerce_value,
    format_value,
    make_tool_call,
)

_OPEN, _CLOSE = SpecialToken("<tool_call>"), SpecialToken("</tool_call>")
_END_VALUE = "</parameter>"
_START_TAGS = compile_start_tags(r"<tool_call>|<function=")
_FUNCTION = re.compile(r"(?:<tool_call>\s*)?<function=(?P<name>[^<>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=(?P<key>[^<>\n]+)>\n?")
_END = re.compile(r"\s*</function>(?:\s*</tool_call>)?")
_BOUNDARY = re.compile(r"</tool_call>|(?=<tool_call>|<function=|</?think>|<\|)")


def parse_qwen3_coder(text: str, /, tools: Sequence[ToolSpec] = ()) -> ParsedTurn:
    return parse_turn(text, _START_TAGS, partial(_parse_block, tools, text.rfind(_END_VALUE)))


def write_qwen3_coder(calls: Sequence[ToolCall], /) -> Iterator[str]:
    for i, call in enumerate(calls):
        yield from ("\n" if i else "", _OPEN, f"\n<function={call.name}>\n")
        for key, value in call.arguments.items():
            yield f"<parameter={key}>\n{format_value(value)}\n</parameter>\n"
        yield from ("</function>\n", _CLOSE)


def _parse_block(
    tools: Sequence[ToolSpec], last_value: int, text: str, start_tag: re.Match[str]
) -> Block:
    position = start_tag.end()
    try:
        function = _FUNCTION.match(text, start_tag.start())
        if function is None:
            raise ValueError("a call must name a function")
        name, position = function["name"].strip(), function.end()
        arguments: dict[str, Any] = {}
        while parameter := _PARAMETER.match(text, position):
            key = parameter["key"].strip()
            if key in arguments:
                raise ValueError(f"the argument {key} occurs twice")
            value, position = read_until(text, parameter.end(), _END_VALUE, last=last_value)
            arguments[key] = coerce_value(tools, name, key, value.removesuffix("\n"))
        end = _END.match(text, position)
        if end is None:
            raise ValueError("a call must end with </function>")
        return Block(end=end.end(), calls=(make_tool_call(name, arguments),))
    except PARSE_ERRORS:
        stop = _BOUNDARY.search(text, position)
        return Block(end=stop.end() if stop else len(text), malformed=True)
