"""OpenAIChatEngine: a ChatEngine behind /v1/chat/completions of vLLM or `skyfleet serve`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skyfleet.chat.completion import Completion
from skyfleet.chat.message import Message, ToolSpec
from skyfleet.engines.chat_engine import Spoken
from skyfleet.engines.openai_messages import read_reply, written_tool, written_turn
from skyfleet.engines.openai_tokens import (
    SESSION_HEADER,
    body_fields,
    completion_of,
    no_tokens,
    version_of,
)
from skyfleet.engines.posting import Endpoint, bearer
from skyfleet.engines.sampling import SamplingParams
from skyfleet.errors import EngineError


class OpenAIChatEngine(Endpoint):
    def __init__(
        self,
        url: str,
        *,
        model: str,
        api_key: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        timeout_seconds: float = 900,
        max_concurrent: int = 512,
        tries: int = 8,
    ) -> None:
        """`url` ends where /chat/completions begins: http://localhost:8000/v1."""
        super().__init__(
            f"{url.rstrip('/')}/chat/completions",
            bearer(api_key),
            timeout_seconds=timeout_seconds,
            max_concurrent=max_concurrent,
            tries=tries,
        )
        self._model, self._template_kwargs = model, dict(chat_template_kwargs or {})
        self.policy_version = 0
        """Recorded on completions, unless the server tells its own."""

    async def speak(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        sampling: SamplingParams,
        *,
        session: str,
    ) -> Spoken:
        """ConfigError where the server gives no token ids."""
        version = self.policy_version
        body: dict[str, Any] = {
            "model": self._model,
            # So that a template which keeps thoughts gives the tokens that were sampled.
            "messages": [written_turn(message) for message in messages],
            "logprobs": True,
            **body_fields(sampling, session=session, position=len(messages)),
            # The server knows how its model ends a turn.
            "ignore_eos": False,
        }
        if tools:
            body |= {"tools": [written_tool(spec) for spec in tools], "tool_choice": "auto"}
        if self._template_kwargs:
            body["chat_template_kwargs"] = self._template_kwargs
        answer = await self.post(body, {SESSION_HEADER: session})
        version = version_of(answer, version)
        match answer:
            case {"choices": []}:
                return _nothing_said(version)
            case {"choices": [{"message": dict() as said, "token_ids": list()} as choice, *_]}:
                # vLLM tells the prompt beside the choices, SGLang in each.
                prompt = answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
                if isinstance(prompt, list):
                    told = (choice.get("logprobs") or {}).get("content") or ()
                    logprobs = [token.get("logprob") for token in told]
                    completion = completion_of(choice, logprobs, policy_version=version)
                    if completion.finish == "abort":
                        # Half a message: a chat cannot go on from its tokens.
                        raise EngineError(f"{self._url} broke the turn off")
                    return Spoken(
                        message=read_reply(said),
                        prompt_token_ids=tuple(prompt),
                        completion=completion,
                    )
        async with self.connection() as client:
            raise await no_tokens(client, self._url)

    async def release(self, session: str) -> None:
        """A server drops the oldest of its cache by itself."""


def _nothing_said(policy_version: int) -> Spoken:
    silence = Completion(token_ids=(), logprobs=(), finish="stop", policy_version=policy_version)
    return Spoken(message=Message(role="assistant"), prompt_token_ids=(), completion=silence)
