"""Chat completions from an OpenAI-compatible server, with tokens or as messages only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skyfleet.chat.message import Message, ToolSpec
from skyfleet.chat.transcript import Completion
from skyfleet.engines.chat_engine import ChatCompletion
from skyfleet.engines.engine import ReplyTruncatedError
from skyfleet.engines.http_client import (
    RequestRejectedError,
    RetryingClient,
    UnsupportedParameterError,
    auth_header,
)
from skyfleet.engines.openai_engine import (
    SESSION_HEADER,
    missing_token_ids_error,
    parse_completion,
    parse_policy_version,
    sampling_fields,
)
from skyfleet.engines.openai_messages import (
    parse_openai_message,
    to_openai_message,
    to_openai_tool,
    to_openai_turn,
)
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.errors import EngineError

_OUTPUT_LIMIT_MESSAGE = "model output limit was reached"
"""OpenAI's message when reasoning used up all tokens of a turn."""


class OpenAIChat(RetryingClient):
    """A ChatModel behind a chat completions endpoint, for evaluation and teachers."""

    def __init__(
        self, url: str, *, model: str, api_key: str | None = None, timeout_seconds: float = 300
    ) -> None:
        """`url` is the base URL, without /chat/completions: http://localhost:8000/v1."""
        address = f"{url.rstrip('/')}/chat/completions"
        super().__init__(address, auth_header(api_key), timeout_seconds=timeout_seconds)
        self._model = model
        self._unsupported: set[str] = set()
        """Parameters that the model rejected and that can be left out."""

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], sampling: SamplingParams
    ) -> Message:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [to_openai_message(message) for message in messages],
            "max_tokens": sampling.max_generate_length,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        if tools:
            body["tools"] = [to_openai_tool(spec) for spec in tools]
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        answer = await self._post_supported(body)
        match answer:
            case {"choices": [{"message": dict() as reply} as choice, *_]}:
                message = parse_openai_message(reply)
                if choice.get("finish_reason") == "length":
                    raise ReplyTruncatedError(message)
                return message
        raise RequestRejectedError(f"{self._model} returned no message: {str(answer)[:300]}")

    async def _post_supported(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Post `body`, and again without each parameter that the model rejects and that can be left
        out."""
        while True:
            left_out = {key for key in self._unsupported if _is_optional(key, body)}
            sent = {key: value for key, value in body.items() if key not in left_out}
            if "max_tokens" in left_out:
                sent["max_completion_tokens"] = body["max_tokens"]
            try:
                return await self.post(sent)
            except UnsupportedParameterError as error:
                if error.param not in sent or not _is_optional(error.param, body):
                    raise
                self._unsupported.add(error.param)
            except RequestRejectedError as error:
                if _OUTPUT_LIMIT_MESSAGE not in str(error):
                    raise
                raise ReplyTruncatedError(Message(role="assistant")) from error


def _is_optional(param: str, body: Mapping[str, Any]) -> bool:
    """GPT-5 renames `max_tokens`, and accepts no sampling parameters, whose default is 1."""
    return param == "max_tokens" or (param in ("temperature", "top_p") and body[param] == 1)


class OpenAIChatEngine(RetryingClient):
    """A ChatEngine behind a chat completions endpoint: messages in, a message with its tokens
    out."""

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
        """`url` is the base URL, without /chat/completions: http://localhost:8000/v1."""
        super().__init__(
            f"{url.rstrip('/')}/chat/completions",
            auth_header(api_key),
            timeout_seconds=timeout_seconds,
            max_concurrent=max_concurrent,
            tries=tries,
        )
        self._model, self._template_kwargs = model, dict(chat_template_kwargs or {})
        self.policy_version = 0
        """Recorded on completions, unless the server reports its own."""

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        sampling: SamplingParams,
        *,
        session: str,
    ) -> ChatCompletion:
        """ConfigError if the server returns no token ids."""
        version = self.policy_version
        body: dict[str, Any] = {
            "model": self._model,
            # With reasoning: a template that keeps it then renders the tokens that were sampled.
            "messages": [to_openai_turn(message) for message in messages],
            "logprobs": True,
            **sampling_fields(sampling, session=session, position=len(messages)),
            # The server knows the stop tokens of its chat template.
            "ignore_eos": False,
        }
        if tools:
            body |= {"tools": [to_openai_tool(spec) for spec in tools], "tool_choice": "auto"}
        if self._template_kwargs:
            body["chat_template_kwargs"] = self._template_kwargs
        answer = await self.post(body, {SESSION_HEADER: session})
        version = parse_policy_version(answer, version)
        match answer:
            case {"choices": []}:
                return _empty_completion(version)
            case {"choices": [{"message": dict() as reply, "token_ids": list()} as choice, *_]}:
                # vLLM returns the prompt beside the choices, SGLang in each choice.
                prompt = answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
                if isinstance(prompt, list):
                    tokens = (choice.get("logprobs") or {}).get("content") or ()
                    logprobs = [token.get("logprob") for token in tokens]
                    completion = parse_completion(choice, logprobs, policy_version=version)
                    if completion.finish == "abort":
                        # A chat endpoint cannot continue a partial message.
                        raise EngineError(f"{self._url} aborted the turn")
                    return ChatCompletion(
                        message=parse_openai_message(reply),
                        prompt_token_ids=tuple(prompt),
                        completion=completion,
                    )
        async with self.connection() as client:
            raise await missing_token_ids_error(client, self._url)

    async def release(self, session: str) -> None:
        """Nothing to do: a server evicts its cache by itself."""


def _empty_completion(policy_version: int) -> ChatCompletion:
    empty = Completion(token_ids=(), logprobs=(), finish="stop", policy_version=policy_version)
    return ChatCompletion(message=Message(role="assistant"), prompt_token_ids=(), completion=empty)
