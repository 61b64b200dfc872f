"""Format an episode's messages as the `conversation` argument of a verifier."""

from __future__ import annotations

import json
from collections.abc import Sequence

from skyfleet.chat.message import Message


def conversation_json(messages: Sequence[Message]) -> str:
    """Return a JSON list of role and content; a tool call is the JSON of its name and arguments."""
    turns = [{"role": message.role, "content": _format_content(message)} for message in messages]
    return json.dumps(turns, ensure_ascii=False)


def _format_content(message: Message) -> str:
    calls = (
        json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)
        for call in message.tool_calls
    )
    return "\n".join(filter(None, (message.text, *calls)))
