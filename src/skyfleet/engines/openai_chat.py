"""Chat completions from an OpenAI-compatible server, with tokens or as messages only."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from skyfleet.chat.message import Message, ToolSpec
from skyfleet.engines.chat_engine import ChatCompletion
from skyfleet.engines.engine import ReplyTruncatedError
from skyfleet.engines.http_client import (
    RequestRejectedError,
    RetryingClient,
    UnsupportedParameterError,
    auth_header,
)
from skyfleet.engines.openai_completion import (
    MAX_VOCAB_SIZE,
    check_model,
    check_reply,
    find_logprobs,
    invalid_completion,
    parse_choice,
    parse_completion,
    parse_finish,
    parse_policy_version,
    parse_token_ids,
)
from skyfleet.engines.openai_engine import (
    missing_token_ids_error,
    sampling_fields,
    session_header,
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
        with invalid_completion(self._url):
            choice = parse_choice(answer)
            message, finish = _parse_message(choice), parse_finish(choice)
        if finish == "abort":
            raise EngineError(f"{self._url} aborted the turn")
        if finish == "length":
            raise ReplyTruncatedError(message)
        return message

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
        vocab_size: int = MAX_VOCAB_SIZE,
        model_names: Collection[str] = (),
    ) -> None:
        """`url` is the base URL, without /chat/completions: http://localhost:8000/v1.

        `vocab_size` and `model_names`: as in OpenAIEngine.
        """
        super().__init__(
            f"{url.rstrip('/')}/chat/completions",
            auth_header(api_key),
            timeout_seconds=timeout_seconds,
            max_concurrent=max_concurrent,
            tries=tries,
        )
        self._model, self._template_kwargs = model, dict(chat_template_kwargs or {})
        self._model_names, self._vocab_size = model_names, vocab_size
        self._returns_token_ids = False
        """It did so at least once."""
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
        answer = await self.post(body, session_header(session))
        with invalid_completion(self._url):
            check_model(answer, self._model_names)
            choice = parse_choice(answer)
            # vLLM returns the prompt beside the choices, SGLang in each choice.
            prompt = answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
            has_tokens = "token_ids" in choice and prompt is not None
            if has_tokens or self._returns_token_ids:
                completion = self._parse_turn(
                    choice, prompt, sampling, parse_policy_version(answer, version)
                )
                self._returns_token_ids = True
                if completion.completion.finish == "abort":
                    # A chat endpoint cannot continue a partial message.
                    raise EngineError(f"{self._url} aborted the turn")
                return completion
        async with self.connection() as client:
            raise await missing_token_ids_error(client, self._url)

    async def release(self, session: str) -> None:
        """Nothing to do: a server evicts its cache by itself."""

    def _parse_turn(
        self,
        choice: Mapping[str, Any],
        prompt: object,
        sampling: SamplingParams,
        policy_version: int,
    ) -> ChatCompletion:
        tokens = find_logprobs(choice, "content")
        if not all(isinstance(token, dict) for token in tokens):
            raise ValueError(f"logprobs.content={tokens!r}, not a list of objects")
        return ChatCompletion(
            message=_parse_message(choice),
            prompt_token_ids=parse_token_ids(
                prompt, "prompt_token_ids", vocab_size=self._vocab_size
            ),
            completion=parse_completion(
                choice,
                [token.get("logprob") for token in tokens],
                max_tokens=sampling.max_generate_length,
                policy_version=policy_version,
                vocab_size=self._vocab_size,
            ),
        )


def _parse_message(choice: Mapping[str, Any]) -> Message:
    reply = choice.get("message")
    if not isinstance(reply, dict):
        raise ValueError(f"message={reply!r}, not an object")
    check_reply(reply)
    return parse_openai_message(reply)
