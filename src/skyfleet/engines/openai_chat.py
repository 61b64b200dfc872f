"""OpenAIChat: a ChatModel behind any endpoint that speaks OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skyfleet.chat.message import Message, ToolSpec
from skyfleet.engines.engine import CutShortError
from skyfleet.engines.openai_messages import read_reply, written_message, written_tool
from skyfleet.engines.posting import Endpoint, RefusedError, UnsupportedError, bearer
from skyfleet.engines.sampling import SamplingParams

_OUT_OF_TOKENS = "model output limit was reached"
"""How OpenAI says that all of a turn's tokens went into thoughts."""


class OpenAIChat(Endpoint):
    def __init__(
        self, url: str, *, model: str, api_key: str | None = None, timeout_seconds: float = 300
    ) -> None:
        """`url` ends where /chat/completions begins: http://localhost:8000/v1."""
        address = f"{url.rstrip('/')}/chat/completions"
        super().__init__(address, bearer(api_key), timeout_seconds=timeout_seconds)
        self._model = model
        self._unsupported: set[str] = set()
        """What the model did not take, and can do without."""

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
        answer = await self._asked(body)
        match answer:
            case {"choices": [{"message": dict() as said} as choice, *_]}:
                message = read_reply(said)
                if choice.get("finish_reason") == "length":
                    raise CutShortError(message)
                return message
        raise RefusedError(f"{self._model} answered without a message: {str(answer)[:300]}")

    async def _asked(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Once more without each parameter that the model does not take and can do without."""
        while True:
            left_out = {key for key in self._unsupported if _can_go(key, body)}
            sent = {key: value for key, value in body.items() if key not in left_out}
            if "max_tokens" in left_out:
                sent["max_completion_tokens"] = body["max_tokens"]
            try:
                return await self.post(sent)
            except UnsupportedError as error:
                if error.param not in sent or not _can_go(error.param, body):
                    raise
                self._unsupported.add(error.param)
            except RefusedError as error:
                if _OUT_OF_TOKENS not in str(error):
                    raise
                raise CutShortError(Message(role="assistant")) from error


def _can_go(param: str, body: Mapping[str, Any]) -> bool:
    """GPT-5 has another name for `max_tokens`, and takes no sampling but its own: all at 1."""
    return param == "max_tokens" or (param in ("temperature", "top_p") and body[param] == 1)
