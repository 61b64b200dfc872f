"""Convert messages, tools and replies to and from the format of OpenAI's chat completions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from skyfleet.chat.message import Message, ToolCall, ToolSpec, extract_text
from skyfleet.chat.tool_calls.parser import assign_call_ids, split_reasoning
from skyfleet.chat.tool_calls.strict_json import PARSE_ERRORS, decode, make_tool_call


def to_openai_message(message: Message) -> dict[str, Any]:
    """Convert a message without its reasoning, which most endpoints reject."""
    written: dict[str, Any] = {"role": message.role, "content": extract_text(message)}
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


def to_openai_turn(message: Message) -> dict[str, Any]:
    """Convert a message with its reasoning, and with malformed tool calls as text."""
    written = to_openai_message(message) | {"content": visible_text(message)}
    if message.reasoning is not None:
        written |= {"reasoning": message.reasoning, "reasoning_content": message.reasoning}
    return written


def visible_text(message: Message) -> str:
    """The content, with malformed tool calls as text and without reasoning."""
    return "\n".join(filter(None, (extract_text(message), *message.malformed_calls)))


def to_openai_tool(spec: ToolSpec) -> dict[str, Any]:
    function = {
        "name": spec.name,
        "description": spec.description,
        "parameters": dict(spec.parameters),
    }
    return {"type": "function", "function": function}


def parse_openai_message(reply: Mapping[str, Any], *, splits: bool = True) -> Message:
    """Parse an assistant message; tool calls that cannot be parsed are kept as malformed.

    Servers without a reasoning parser leave reasoning in the content: `splits` separates it.
    """
    calls: list[ToolCall] = []
    # Only our own server sends this field; for other clients the calls are part of the content.
    malformed = [str(call) for call in reply.get("malformed_calls") or ()]
    malformed_text = "\n".join(malformed)
    tool_calls = reply.get("tool_calls")
    for call in tool_calls if isinstance(tool_calls, list) else ():
        try:
            calls.append(_parse_call(call))
        except PARSE_ERRORS:
            malformed.append(json.dumps(call))
    content, reasoning = _text(reply.get("content")), _reasoning(reply)
    content = content.removesuffix(malformed_text).rstrip() if malformed_text else content
    if splits and reasoning is None:
        content, reasoning = split_reasoning(content)
    return Message(
        role="assistant",
        content=content,
        reasoning=reasoning,
        tool_calls=assign_call_ids(calls),
        malformed_calls=tuple(malformed),
    )


def _parse_call(call: Any) -> ToolCall:
    """ValueError if it is not a call.

    Some servers send arguments as an object or an empty string.
    """
    match call:
        case {"function": {"name": name, "arguments": arguments}}:
            parsed = decode(arguments or "{}") if isinstance(arguments, str) else arguments
            return make_tool_call(name, parsed, id=call.get("id"))
    raise ValueError("a tool call needs a function with a name and arguments")


def _reasoning(reply: Mapping[str, Any]) -> str | None:
    """None if there is none, or not in a field of its own.

    Mistral's models send it in content chunks.
    """
    for key in ("reasoning_content", "reasoning"):
        if isinstance(reply.get(key), str):
            return _text(reply[key])
    chunks = _chunks(reply.get("content"), "thinking")
    return "".join(map(_text, chunks)) if chunks else None


def _text(content: object) -> str:
    """A string, or the text of content chunks.

    Lone surrogates are replaced, as they cannot be sent back.
    """
    if isinstance(content, list):
        content = "".join(text for text in _chunks(content, "text") if isinstance(text, str))
    return content.encode(errors="replace").decode() if isinstance(content, str) else ""


def _chunks(content: object, key: str) -> list[object]:
    chunks = content if isinstance(content, list) else []
    return [chunk[key] for chunk in chunks if isinstance(chunk, dict) and key in chunk]
