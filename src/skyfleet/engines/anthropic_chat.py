"""AnthropicChat: a ChatModel behind Anthropic's messages endpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skyfleet.chat.message import Message, ToolCall, ToolSpec, extract_text
from skyfleet.engines.engine import ReplyTruncatedError
from skyfleet.engines.http_client import RetryingClient
from skyfleet.engines.openai_completion import invalid_completion
from skyfleet.engines.sampling_params import SamplingParams

API_VERSION = "2023-06-01"


class AnthropicChat(RetryingClient):
    def __init__(
        self, url: str, *, model: str, api_key: str | None = None, timeout_seconds: float = 300
    ) -> None:
        """`url` is the base URL, without /v1/messages: https://api.anthropic.com."""
        headers = {"anthropic-version": API_VERSION} | ({"x-api-key": api_key} if api_key else {})
        address = f"{url.rstrip('/')}/v1/messages"
        super().__init__(address, headers, timeout_seconds=timeout_seconds)
        self._model = model

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], sampling: SamplingParams
    ) -> Message:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": _to_turns(messages),
            "max_tokens": sampling.max_generate_length,
            "temperature": min(1.0, sampling.temperature),
        }
        if system := "\n\n".join(
            extract_text(message) for message in messages if message.role == "system"
        ):
            body["system"] = system
        if tools:
            body["tools"] = [_to_tool(spec) for spec in tools]
        if sampling.top_p < 1:
            body["top_p"] = sampling.top_p
        if sampling.stop:
            body["stop_sequences"] = list(sampling.stop)
        answer = await self.post(body)
        with invalid_completion(self._url):
            message = _parse_blocks(_find_blocks(answer))
        if answer.get("stop_reason") == "max_tokens":
            raise ReplyTruncatedError(message)
        return message


def _to_turns(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Alternate user and assistant: all tool results of one message become one user message."""
    turns: list[dict[str, Any]] = []
    for message in messages:
        if message.role == "system":
            continue
        role = "assistant" if message.role == "assistant" else "user"
        if not turns or turns[-1]["role"] != role:
            turns.append({"role": role, "content": []})
        turns[-1]["content"] += _to_blocks(message)
    return turns


def _to_blocks(message: Message) -> list[dict[str, Any]]:
    text = extract_text(message)
    if message.role == "tool":
        return [
            {
                "type": "tool_result",
                "tool_use_id": message.tool_call_id,
                "content": text,
                "is_error": message.is_error,
            }
        ]
    calls = [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)}
        for call in message.tool_calls
    ]
    # The API rejects an empty text block, and a message without blocks.
    content = text if text.strip() or calls else "(nothing)"
    return [*([{"type": "text", "text": content}] if content.strip() else []), *calls]


def _to_tool(spec: ToolSpec) -> dict[str, Any]:
    schema = dict(spec.parameters)
    return {"name": spec.name, "description": spec.description, "input_schema": schema}


def _find_blocks(answer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    match answer:
        case {"content": list() as blocks} if all(isinstance(block, dict) for block in blocks):
            return blocks
        case {"error": error} if error:
            raise ValueError(f"error: {error}")
    raise ValueError(f"content={answer.get('content')!r}, not a list of objects")


def _parse_blocks(blocks: Sequence[Mapping[str, Any]]) -> Message:
    def join(kind: str) -> str:
        return "".join(str(block[kind]) for block in blocks if block.get("type") == kind)

    return Message(
        role="assistant",
        content=join("text"),
        reasoning=join("thinking") or None,
        tool_calls=tuple(_parse_call(block) for block in blocks if block.get("type") == "tool_use"),
    )


def _parse_call(block: Mapping[str, Any]) -> ToolCall:
    match block:
        case {"id": str() as id, "name": str() as name, "input": dict() as arguments}:
            return ToolCall(id=id, name=name, arguments=arguments)
    raise ValueError(f"{dict(block)!r} is not a tool call")
