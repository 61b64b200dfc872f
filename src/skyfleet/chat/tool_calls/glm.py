"""GLM-4 tool calls: a name, then each key and value in tags.

`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`, with line breaks
between the tags up to GLM-4.6. Only `</tool_call>` shows that the arguments are complete.
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
    skip_space,
)
from skyfleet.chat.tool_calls.strict_json import (
    PARSE_ERRORS,
    coerce_value,
    format_value,
    make_tool_call,
)

_OPEN, _CLOSE = SpecialToken("<tool_call>"), SpecialToken("</tool_call>")
_KEY, _END_KEY = SpecialToken("<arg_key>"), SpecialToken("</arg_key>")
_VALUE, _END_VALUE = SpecialToken("<arg_value>"), SpecialToken("</arg_value>")

_START_TAGS = compile_start_tags("<tool_call>")
_NAME = re.compile(r"\s*(?P<name>[^\s<>]+)\s*")
_ARGUMENT = re.compile(r"<arg_key>(?P<key>[^<>]+)</arg_key>\s*<arg_value>")
_BOUNDARY = re.compile(r"</tool_call>|(?=<tool_call>|</?think>|<\|)")


def parse_glm(text: str, /, tools: Sequence[ToolSpec] = ()) -> ParsedTurn:
    return parse_turn(text, _START_TAGS, partial(_parse_block, tools, text.rfind(_END_VALUE)))


def write_glm(calls: Sequence[ToolCall], /) -> Iterator[str]:
    for i, call in enumerate(calls):
        yield from ("\n" if i else "", _OPEN, f"{call.name}\n")
        for key, value in call.arguments.items():
            yield from (_KEY, key, _END_KEY, "\n", _VALUE, format_value(value), _END_VALUE, "\n")
        yield _CLOSE


def _parse_block(
    tools: Sequence[ToolSpec], last_value: int, text: str, start_tag: re.Match[str]
) -> Block:
    position = start_tag.end()
    try:
        head = _NAME.match(text, position)
        if head is None:
            raise ValueError("a call must begin with a name")
        name, position = head["name"], head.end()
        arguments: dict[str, Any] = {}
        while argument := _ARGUMENT.match(text, position):
            key = argument["key"].strip()
            if key in arguments:
                raise ValueError(f"the argument {key} occurs twice")
            value, position = read_until(text, argument.end(), _END_VALUE, last=last_value)
            arguments[key] = coerce_value(tools, name, key, value)
            position = skip_space(text, position)
        if not text.startswith(_CLOSE, position):
            raise ValueError("a call must end with </tool_call>")
        return Block(end=position + len(_CLOSE), calls=(make_tool_call(name, arguments),))
    except PARSE_ERRORS:
        stop = _BOUNDARY.search(text, position)
        return Block(end=stop.end() if stop else len(text), malformed=True)
