"""Harmony reading: thought, speech and calls out of the channels of gpt-oss."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from skyfleet.chat.message import ToolCall, ToolSpec
from skyfleet.chat.tool_calls.parser import Parsed
from skyfleet.chat.tool_calls.strict_json import UNREADABLE, decode, sound_call

_MESSAGE = re.compile(
    r"(?P<header>.*?)<\|message\|>(?P<body>.*?)(?:<\|(?:end|call|return)\|>|\Z)", re.DOTALL
)
_RECIPIENT = re.compile(r"to=(\S*?)(?=[\s<]|\Z)")


def parse_harmony(text: str, /, tools: Sequence[ToolSpec] = ()) -> Parsed:
    """Reads on from `<|start|>assistant`. Never raises.

    Analysis is thought, a message to a function is a call, everything else is speech.
    """
    thoughts: list[str] = []
    speech: list[str] = []
    calls: list[ToolCall] = []
    malformed: list[str] = []
    for header, body in _messages(text):
        recipient = _RECIPIENT.search(header)
        if recipient:
            call = _call(recipient[1], body, len(calls))
            if call:
                calls.append(call)
            else:
                malformed.append(f"{header}<|message|>{body}")
        else:
            (thoughts if "<|channel|>analysis" in header else speech).append(body)
    return Parsed(
        content="\n".join(filter(None, speech)),
        reasoning="\n".join(thoughts) if thoughts else None,
        tool_calls=tuple(calls),
        malformed_calls=tuple(malformed),
    )


def _messages(text: str) -> Iterator[tuple[str, str]]:
    position = 0
    while found := _MESSAGE.match(text, position):
        yield found["header"], found["body"]
        position = found.end()
    if position < len(text):
        # Words without a header are speech; a header without words was cut short.
        rest = text[position:]
        yield ("", rest) if "<|" not in rest else (rest, "")


def _call(recipient: str, body: str, place: int) -> ToolCall | None:
    name = recipient.removeprefix("functions.")
    try:
        arguments = decode(body)
        # A text would be taken for JSON once more.
        return sound_call(
            name, arguments if isinstance(arguments, dict) else None, id=f"functions.{name}:{place}"
        )
    except UNREADABLE:
        return None
