"""Messages as OpenAI's chat completions write them, and what such an endpoint says, read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from skyfleet.chat.message import Message, ToolCall, ToolSpec
from skyfleet.chat.text_only import text_only
from skyfleet.chat.tool_calls.blocks import thoughts_aside


def written_message(message: Message) -> dict[str, Any]:
    """Without its thoughts, which most endpoints would refuse."""
    written: dict[str, Any] = {"role": message.role, "content": text_only(message)}
    if message.tool_calls:
        written["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
            }
            for call in message.tool_calls
        ]
    if message.role == "tool":
        written["tool_call_id"] = message.tool_call_id
    return written


def written_turn(message: Message) -> dict[str, Any]:
    """With its thoughts, and calls that could not be read as text: all that was said."""
    written = written_message(message) | {"content": aloud(message)}
    if message.reasoning is not None:
        written |= {"reasoning": message.reasoning, "reasoning_content": message.reasoning}
    return written


def aloud(message: Message) -> str:
    return "\n".join(filter(None, (text_only(message), *message.malformed_calls)))


def written_tool(spec: ToolSpec) -> dict[str, Any]:
    function = {
        "name": spec.name,
        "description": spec.description,
        "parameters": dict(spec.parameters),
    }
    return {"type": "function", "function": function}


def read_reply(said: Mapping[str, Any], *, splits: bool = True) -> Message:
    """An assistant's message; a call that cannot be read is kept as malformed.

    Servers that were not told how their model thinks leave its thoughts in what it says: `splits`
    takes them out.
    """
    calls: list[ToolCall] = []
    # Ours alone tells them; to others they stand in what is said.
    malformed = [str(call) for call in said.get("malformed_calls") or ()]
    told = "\n".join(malformed)
    for number, call in enumerate(said.get("tool_calls") or ()):
        match call:
            case {"function": {"name": str() as name, "arguments": arguments}}:
                read = _arguments(arguments)
                if read is not None:
                    made = str(call.get("id") or f"call_{number}")
                    calls.append(ToolCall(id=made, name=name, arguments=read))
                    continue
        malformed.append(json.dumps(call))
    content, reasoning = said.get("content") or "", said.get("reasoning_content")
    if reasoning is None:
        reasoning = said.get("reasoning")
    if isinstance(content, str):
        content = content.removesuffix(told).rstrip() if told else content
        if splits and reasoning is None:
            content, reasoning = thoughts_aside(content)
    return Message(
        role="assistant",
        content=content,
        reasoning=reasoning,
        tool_calls=tuple(calls),
        malformed_calls=tuple(malformed),
    )


def _arguments(text: object) -> dict[str, Any] | None:
    """None: not an object. Some servers send the object itself, some an empty string."""
    if isinstance(text, dict):
        return text
    try:
        read = json.loads(str(text) or "{}")
    except ValueError:
        return None
    return read if isinstance(read, dict) else None
