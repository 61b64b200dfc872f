"""Probes: small conversations a chat template is tried on before it is trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from skyfleet.chat.message import Message, ToolCall, ToolSpec

SYSTEM = Message(role="system", content="You know birds.")
QUESTION = Message(role="user", content="What is a heron?")
ANSWER = Message(role="assistant", content="A long-legged bird.")

TOOLS = (
    ToolSpec(
        name="look_up",
        description="Looks a word up.",
        parameters={
            "type": "object",
            "properties": {"word": {"type": "string"}},
            "required": ["word"],
        },
    ),
)
_FIRST = ToolCall(id="call_0", name="look_up", arguments={"word": "heron"})
_SECOND = ToolCall(id="call_1", name="look_up", arguments={"word": "héron"})
_ASK_BOTH = Message(role="assistant", content="Let me see.", tool_calls=(_FIRST, _SECOND))
CALL = Message(role="assistant", tool_calls=(_FIRST,))
RESULT = Message(role="tool", content="a wading bird", tool_call_id="call_0")
_OTHER_RESULT = Message(role="tool", content="un échassier", tool_call_id="call_1")

TALK = (QUESTION, ANSWER, QUESTION)
WORK = (QUESTION, _ASK_BOTH, RESULT, _OTHER_RESULT, ANSWER, QUESTION, CALL, RESULT)
CALL_BY_CALL = (QUESTION, CALL, RESULT, ANSWER, QUESTION, CALL, RESULT)
"""For templates that take one call a turn, and no word beside it."""

Probe = tuple[Sequence[Message], Sequence[ToolSpec]]


def thoughtful(messages: Sequence[Message]) -> tuple[Message, ...]:
    return tuple(
        replace(message, reasoning="I wonder.") if message.role == "assistant" else message
        for message in messages
    )
