"""OpenAIChat: a ChatModel behind any endpoint that speaks OpenAI's chat completions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from skyfleet.chat.message import Message, ToolCall, ToolSpec
from skyfleet.chat.text_only import text_only
from skyfleet.engines.posting import Endpoint, RefusedError
from skyfleet.engines.sampling import SamplingParams


class OpenAIChat(Endpoint):
    def __init__(
        self, url: str, *, model: str, api_key: str | None = None, timeout_seconds: float = 300
    ) -> None:
        """`url` ends where /chat/completions begins: http://localhost:8000/v1."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        address = f"{url.rstrip('/')}/chat/completions"
        super().__init__(address, headers, timeout_seconds=timeout_seconds)
        self._model = model

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], sampling: SamplingParams
    ) -> Message:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [_written(message) for message in messages],
            "max_tokens": sampling.max_generate_length,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        if tools:
            body["tools"] = [_tool(spec) for spec in tools]
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        answer = await self.post(body)
        match answer:
            case {"choices": [{"message": dict() as said}, *_]}:
                return _read(said)
        raise RefusedError(f"{self._model} answered without a message: {str(answer)[:300]}")


def _written(message: Message) -> dict[str, Any]:
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


def _tool(spec: ToolSpec) -> dict[str, Any]:
    function = {
        "name": spec.name,
        "description": spec.description,
        "parameters": dict(spec.parameters),
    }
    return {"type": "function", "function": function}


def _read(said: Mapping[str, Any]) -> Message:
    calls: list[ToolCall] = []
    malformed: list[str] = []
    for number, call in enumerate(said.get("tool_calls") or ()):
        match call:
            case {"function": {"name": str() as name, "arguments": arguments}}:
                read = _arguments(arguments)
                if read is not None:
                    made = str(call.get("id") or f"call_{number}")
                    calls.append(ToolCall(id=made, name=name, arguments=read))
                    continue
        malformed.append(json.dumps(call))
    return Message(
        role="assistant",
        content=said.get("content") or "",
        reasoning=said.get("reasoning_content") or said.get("reasoning"),
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
