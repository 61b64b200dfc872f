"""Conversation: what was said in an episode, as a verifier is given it."""

from __future__ import annotations

import json
from collections.abc import Sequence

from skyfleet.chat.message import Message


def conversation_json(messages: Sequence[Message]) -> str:
    """A JSON list of role and content; a call is the JSON of its name and arguments."""
    turns = [{"role": message.role, "content": _content(message)} for message in messages]
    return json.dumps(turns, ensure_ascii=False)


def _content(message: Message) -> str:
    calls = (
        json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)
        for call in message.tool_calls
    )
    return "\n".join(filter(None, (message.text, *calls)))
