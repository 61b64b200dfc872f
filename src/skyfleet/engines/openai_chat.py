"""OpenAIChat: a ChatModel behind any endpoint that speaks OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skyfleet.chat.message import Message, ToolSpec
from skyfleet.engines.engine import CutShortError
from skyfleet.engines.openai_messages import read_reply, written_message, written_tool
from skyfleet.engines.posting import Endpoint, RefusedError, bearer
from skyfleet.engines.sampling import SamplingParams


class OpenAIChat(Endpoint):
    def __init__(
        self, url: str, *, model: str, api_key: str | None = None, timeout_seconds: float = 300
    ) -> None:
        """`url` ends where /chat/completions begins: http://localhost:8000/v1."""
        address = f"{url.rstrip('/')}/chat/completions"
        super().__init__(address, bearer(api_key), timeout_seconds=timeout_seconds)
        self._model = model

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], sampling: SamplingParams
    ) -> Message:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [written_message(message) for message in messages],
            "max_tokens": sampling.max_generate_length,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        if tools:
            body["tools"] = [written_tool(spec) for spec in tools]
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        answer = await self.post(body)
        match answer:
            case {"choices": [{"message": dict() as said} as choice, *_]}:
                message = read_reply(said)
                if choice.get("finish_reason") == "length":
                    raise CutShortError(message)
                return message
        raise RefusedError(f"{self._model} answered without a message: {str(answer)[:300]}")
