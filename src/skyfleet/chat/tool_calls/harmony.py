"""Harmony: thought, speech and calls in the channels of gpt-oss.

` to=functions.NAME<|channel|>commentary json<|message|>{...}<|call|>` is a call; the recipient may
also stand after the channel. All but the first message of a turn begin with `<|start|>assistant`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from skyfleet.chat.call_ids import call_id
from skyfleet.chat.message import ToolCall, ToolSpec
from skyfleet.chat.pieces import Mark
from skyfleet.chat.tool_calls.parser import Parsed
from skyfleet.chat.tool_calls.strict_json import UNREADABLE, decode, encode, sound_call

START, CHANNEL, MESSAGE = Mark("<|start|>"), Mark("<|channel|>"), Mark("<|message|>")
END, CALL, RETURN = Mark("<|end|>"), Mark("<|call|>"), Mark("<|return|>")

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
    for header, body, said in _messages(text):
        recipient = _RECIPIENT.search(header)
        if recipient:
            call = _call(recipient[1], body, len(calls))
            if call:
                calls.append(call)
            else:
                malformed.append(said)
        else:
            (thoughts if f"{CHANNEL}analysis" in header else speech).append(body)
    return Parsed(
        content="\n".join(filter(None, speech)),
        reasoning="\n".join(thoughts) if thoughts else None,
        tool_calls=tuple(calls),
        malformed_calls=tuple(malformed),
    )


def write_harmony(calls: Sequence[ToolCall], /) -> Iterator[str]:
    for i, call in enumerate(calls):
        yield from (START, "assistant") if i else ()
        yield from (f" to=functions.{call.name}", CHANNEL, "commentary json")
        yield from (MESSAGE, encode(dict(call.arguments)), CALL)


def _messages(text: str) -> Iterator[tuple[str, str, str]]:
    """Header, body, and both as they were said."""
    position = 0
    while found := _MESSAGE.match(text, position):
        yield found["header"], found["body"], text[position : found.end("body")]
        position = found.end()
    if rest := text[position:]:
        # Words without a header are speech; a header without words was cut short.
        yield ("", rest, rest) if "<|" not in rest else (rest, "", rest)


def _call(recipient: str, body: str, place: int) -> ToolCall | None:
    name = recipient.removeprefix("functions.")
    try:
        arguments = decode(body)
        # A text would be taken for JSON once more.
        known = arguments if isinstance(arguments, dict) else None
        return sound_call(name, known, id=call_id(name, place))
    except UNREADABLE:
        return None
