"""Harmony tool calls: reasoning, text and calls in the channels of gpt-oss.

` to=functions.NAME<|channel|>commentary json<|message|>{...}<|call|>` is a call; the recipient may
also follow the channel. All messages of a turn but the first begin with `<|start|>assistant`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from skyfleet.chat.call_ids import format_call_id
from skyfleet.chat.message import ToolCall, ToolSpec
from skyfleet.chat.tokenizer import SpecialToken
from skyfleet.chat.tool_calls.parser import ParsedTurn
from skyfleet.chat.tool_calls.strict_json import PARSE_ERRORS, decode, encode, make_tool_call

START, CHANNEL, MESSAGE = (
    SpecialToken("<|start|>"),
    SpecialToken("<|channel|>"),
    SpecialToken("<|message|>"),
)
END, CALL, RETURN = SpecialToken("<|end|>"), SpecialToken("<|call|>"), SpecialToken("<|return|>")

_MESSAGE = re.compile(
    r"(?P<header>.*?)<\|message\|>(?P<body>.*?)(?:<\|(?:end|call|return)\|>|\Z)", re.DOTALL
)
_RECIPIENT = re.compile(r"to=(\S*?)(?=[\s<]|\Z)")


def parse_harmony(text: str, /, tools: Sequence[ToolSpec] = ()) -> ParsedTurn:
    """Parse what follows `<|start|>assistant`. Never raises.

    The analysis channel is reasoning, a message to a function is a call, all other text is content.
    """
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[ToolCall] = []
    malformed: list[str] = []
    for header, body, raw in _split_messages(text):
        recipient = _RECIPIENT.search(header)
        if recipient:
            call = _parse_call(recipient[1], body, len(calls))
            if call:
                calls.append(call)
            else:
                malformed.append(raw)
        else:
            (reasoning if f"{CHANNEL}analysis" in header else content).append(body)
    return ParsedTurn(
        content="\n".join(filter(None, content)),
        reasoning="\n".join(reasoning) if reasoning else None,
        tool_calls=tuple(calls),
        malformed_calls=tuple(malformed),
    )


def write_harmony(calls: Sequence[ToolCall], /) -> Iterator[str]:
    for i, call in enumerate(calls):
        yield from (START, "assistant") if i else ()
        yield from (f" to=functions.{call.name}", CHANNEL, "commentary json")
        yield from (MESSAGE, encode(dict(call.arguments)), CALL)


def _split_messages(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield the header, the body and the raw text of each message."""
    position = 0
    while found := _MESSAGE.match(text, position):
        yield found["header"], found["body"], text[position : found.end("body")]
        position = found.end()
    if rest := text[position:]:
        # Text without a header is content; a header without a body was cut by length.
        yield ("", rest, rest) if "<|" not in rest else (rest, "", rest)


def _parse_call(recipient: str, body: str, index: int) -> ToolCall | None:
    name = recipient.removeprefix("functions.")
    try:
        arguments = decode(body)
        # `make_tool_call` rejects None; a JSON string must not be decoded a second time.
        checked = arguments if isinstance(arguments, dict) else None
        return make_tool_call(name, checked, id=format_call_id(name, index))
    except PARSE_ERRORS:
        return None
