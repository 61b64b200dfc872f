"""Messages as OpenAI's chat completions write them, and what such an endpoint says, read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from skyfleet.chat.message import Message, ToolCall, ToolSpec
from skyfleet.chat.text_only import text_only
from skyfleet.chat.tool_calls.parser import thoughts_aside, with_ids
from skyfleet.chat.tool_calls.strict_json import UNREADABLE, decode, sound_call


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
    given = said.get("tool_calls")
    for call in given if isinstance(given, list) else ():
        try:
            calls.append(_call(call))
        except UNREADABLE:
            malformed.append(json.dumps(call))
    content, reasoning = _text(said.get("content")), _thought(said)
    content = content.removesuffix(told).rstrip() if told else content
    if splits and reasoning is None:
        content, reasoning = thoughts_aside(content)
    return Message(
        role="assistant",
        content=content,
        reasoning=reasoning,
        tool_calls=with_ids(calls),
        malformed_calls=tuple(malformed),
    )


def _call(call: Any) -> ToolCall:
    """ValueError where there is none. Some servers send the object itself, some an empty string."""
    match call:
        case {"function": {"name": name, "arguments": arguments}}:
            read = decode(arguments or "{}") if isinstance(arguments, str) else arguments
            return sound_call(name, read, id=call.get("id"))
    raise ValueError("a call has a function with a name and arguments")


def _thought(said: Mapping[str, Any]) -> str | None:
    """None: it did not think, or not apart. Mistral's models think in chunks of the content."""
    for key in ("reasoning_content", "reasoning"):
        if isinstance(said.get(key), str):
            return _text(said[key])
    chunks = _chunks(said.get("content"), "thinking")
    return "".join(map(_text, chunks)) if chunks else None


def _text(words: object) -> str:
    """A string, or the text of chunks. Half a letter is replaced: it could not be sent back."""
    if isinstance(words, list):
        words = "".join(text for text in _chunks(words, "text") if isinstance(text, str))
    return words.encode(errors="replace").decode() if isinstance(words, str) else ""


def _chunks(content: object, key: str) -> list[object]:
    found = content if isinstance(content, list) else []
    return [chunk[key] for chunk in found if isinstance(chunk, dict) and key in chunk]
