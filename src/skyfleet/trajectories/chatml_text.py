"""ChatML as text: a conversation that was decoded to one string, split into its messages again."""

from __future__ import annotations

import re
from collections.abc import Iterator

from skyfleet.chat.message import Message
from skyfleet.chat.tool_calls.hermes import parse_hermes
from skyfleet.trajectories.trajectory import Turn

_SPOKEN = re.compile(
    r"<\|im_start\|>(system|user|assistant|tool)\n(.*?)(<\|im_end\|>|(?=<\|im_start\|>)|\Z)",
    re.DOTALL,
)
_TOOL_RESPONSE = re.compile(r"<tool_response>\n?(.*?)\n?</tool_response>", re.DOTALL)
_FLEET_RESULT = "Tool result:\n"
_ASSISTANT = "<|im_start|>assistant\n"


def split_messages(text: str) -> tuple[Message, ...]:
    """A prompt's messages, without the assistant's that is only begun; other text is one user's."""
    if "<|im_start|>" not in text:
        return (Message(role="user", content=text),) if text else ()
    return tuple(
        message
        for role, said, closed in _SPOKEN.findall(text)
        if closed or role != "assistant"
        for message in _messages(role, said)
    )


def read_response(text: str) -> tuple[Turn, ...]:
    """The turns of a response, which begins in the middle of the assistant's first."""
    turns: list[tuple[Message, list[Message]]] = []
    for role, said, closed in _SPOKEN.findall(_ASSISTANT + text):
        # A turn that was begun and never spoken is none.
        if role == "assistant" and (closed or said.strip()):
            turns.append((parse_hermes(said).message, []))
        elif role != "assistant" and turns:
            turns[-1][1].extend(_messages(role, said))
    return tuple(
        Turn(action=action, replies=tuple(replies), reward=0.0, engine_seconds=0.0)
        for action, replies in turns
    )


def _messages(role: str, said: str) -> Iterator[Message]:
    """Results of tools are the user's words in ChatML; here they are the tool's again."""
    if role == "assistant":
        yield parse_hermes(said).message
    elif responses := _TOOL_RESPONSE.findall(said):
        yield from map(_result, responses)
    elif said.startswith((_FLEET_RESULT, "Error:")):
        yield _result(said.removeprefix(_FLEET_RESULT))
    else:
        yield Message(role="system" if role == "system" else "user", content=said)


def _result(text: str) -> Message:
    return Message(role="tool", content=text, is_error=text.lower().startswith("error:"))
