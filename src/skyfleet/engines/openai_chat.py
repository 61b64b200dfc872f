"""Chat completions from an OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skyfleet.chat.message import Message, ToolSpec
from skyfleet.chat.transcript import Completion
from skyfleet.engines.chat_engine import ChatCompletion
from skyfleet.engines.engine import CutShortError
from skyfleet.engines.http_client import Endpoint, RefusedError, UnsupportedError, bearer
from skyfleet.engines.openai_engine import (
    SESSION_HEADER,
    body_fields,
    completion_of,
    no_tokens,
    version_of,
)
from skyfleet.engines.openai_messages import read_reply, written_message, written_tool, written_turn
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.errors import EngineError

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

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        sampling: SamplingParams,
        *,
        session: str,
    ) -> ChatCompletion:
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
                    return ChatCompletion(
                        message=read_reply(said),
                        prompt_token_ids=tuple(prompt),
                        completion=completion,
                    )
        async with self.connection() as client:
            raise await no_tokens(client, self._url)

    async def release(self, session: str) -> None:
        """A server drops the oldest of its cache by itself."""


def _nothing_said(policy_version: int) -> ChatCompletion:
    silence = Completion(token_ids=(), logprobs=(), finish="stop", policy_version=policy_version)
    return ChatCompletion(
        message=Message(role="assistant"), prompt_token_ids=(), completion=silence
    )
