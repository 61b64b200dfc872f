"""OpenAIEngine: token-level completions from an OpenAI-compatible server, such as vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import httpx

from skyfleet.chat.transcript import Completion
from skyfleet.engines.http_client import ContextLengthError, RetryingClient, auth_header
from skyfleet.engines.openai_completion import (
    MAX_VOCAB_SIZE,
    check_model,
    find_logprobs,
    invalid_completion,
    parse_choice,
    parse_completion,
    parse_policy_version,
)
from skyfleet.engines.request_checks import reject_logits_processors
from skyfleet.engines.response_body import ERROR_BYTES, InvalidBodyError, get
from skyfleet.engines.sampling_params import SamplingParams, request_seed
from skyfleet.engines.vllm_versions import MIN_VLLM_WITH_TOKEN_IDS, is_at_least
from skyfleet.errors import ConfigError, EngineError

SESSION_HEADER = "X-Session-ID"
"""The header that vLLM's router and `skyfleet serve` read."""
VERSION_TIMEOUT_SECONDS = 5.0


def session_header(session: str) -> dict[str, str]:
    """A task key may have characters that a header cannot carry."""
    if session.isascii() and session.isprintable():
        return {SESSION_HEADER: session}
    return {SESSION_HEADER: quote(session)}


def sampling_fields(sampling: SamplingParams, *, session: str, position: int) -> dict[str, Any]:
    """All sampling fields of a request, so that the server's defaults change nothing."""
    reject_logits_processors(sampling, "an OpenAI-compatible server")
    fields: dict[str, Any] = {
        "max_tokens": sampling.max_generate_length,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,
        "ignore_eos": True,  # stop_token_ids lists every token that ends a turn
        "stop_token_ids": list(sampling.stop_token_ids),
        "skip_special_tokens": False,  # a stop string may contain one
        "return_token_ids": True,
    }
    if sampling.stop:
        fields |= {"stop": list(sampling.stop), "include_stop_str_in_output": True}
    if sampling.seed is not None:
        fields["seed"] = request_seed(sampling.seed, session, position)
    return fields


async def missing_token_ids_error(client: httpx.AsyncClient, url: str) -> ConfigError:
    """The error for a server that returns no token ids, with its vLLM version and the remedy."""
    return ConfigError(
        f"{url} returned no token ids{await _describe_vllm(client, url)}, so it can only be "
        "evaluated (skyfleet evaluate --endpoint); to get token ids, serve the model with vLLM "
        f"{MIN_VLLM_WITH_TOKEN_IDS} or newer, or with skyfleet serve"
    )


async def _describe_vllm(client: httpx.AsyncClient, url: str) -> str:
    try:
        async with asyncio.timeout(VERSION_TIMEOUT_SECONDS):
            version_url = httpx.URL(url).join("/version")
            answer = (await get(client, version_url, max_bytes=ERROR_BYTES)).json()
    except (httpx.HTTPError, httpx.InvalidURL, InvalidBodyError, TimeoutError):
        return ""
    version = answer.get("version") if isinstance(answer, dict) else None
    if not isinstance(version, str):
        return ""
    old = "" if is_at_least(version, MIN_VLLM_WITH_TOKEN_IDS) else " is too old"
    return f" (vLLM {version}{old})"


class OpenAIEngine(RetryingClient):
    def __init__(
        self,
        url: str,
        *,
        model: str,
        api_key: str | None = None,
        timeout_seconds: float = 900,
        max_concurrent: int = 512,
        tries: int = 8,
        max_model_len: int | None = None,
        vocab_size: int = MAX_VOCAB_SIZE,
        model_names: Collection[str] = (),
    ) -> None:
        """`url` is the base URL, without /completions: http://localhost:8000/v1.

        `max_model_len` and `model_names` are what the server reports: its context length, and the
        names under which it serves the model. An answer that contradicts them is an EngineError,
        and so is a token outside the vocabulary.
        """
        super().__init__(
            f"{url.rstrip('/')}/completions",
            auth_header(api_key),
            timeout_seconds=timeout_seconds,
            max_concurrent=max_concurrent,
            tries=tries,
        )
        self.model = model
        self._max_model_len, self._model_names = max_model_len, model_names
        self._vocab_size = vocab_size
        self._returns_token_ids = False
        """It did so at least once."""
        self.policy_version = 0
        """Recorded on completions, unless the server reports its own."""

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        session: str,
        cache_salt: str | None = None,
    ) -> Completion:
        """ConfigError if the server returns no token ids. Only vLLM supports `cache_salt`."""
        version = self.policy_version
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(token_ids),
            "logprobs": 0,  # of the sampled token only
            **sampling_fields(sampling, session=session, position=len(token_ids)),
        }
        if cache_salt is not None:
            body["cache_salt"] = cache_salt
        try:
            answer = await self.post(body, session_header(session))
        except ContextLengthError as error:
            self._check_context(len(token_ids) + sampling.max_generate_length, error)
            raise
        with invalid_completion(self._url):
            check_model(answer, self._model_names)
            choice = parse_choice(answer)
            if "token_ids" in choice or self._returns_token_ids:
                completion = self._parse_turn(answer, choice, body["prompt"], sampling, version)
                self._returns_token_ids = True
                return completion
        async with self.connection() as client:
            raise await missing_token_ids_error(client, self._url)

    def _parse_turn(
        self,
        answer: Mapping[str, Any],
        choice: Mapping[str, Any],
        prompt: list[int],
        sampling: SamplingParams,
        version: int,
    ) -> Completion:
        echo = choice.get("prompt_token_ids", answer.get("prompt_token_ids"))
        if echo is not None and echo != prompt:
            raise ValueError("prompt_token_ids are not those of the request")
        completion = parse_completion(
            choice,
            find_logprobs(choice, "token_logprobs"),
            vocab_size=self._vocab_size,
            max_tokens=sampling.max_generate_length,
            policy_version=parse_policy_version(answer, version),
        )
        if not completion.token_ids and completion.finish != "abort":
            # Even an empty turn has the token that ends it.
            raise ValueError("token_ids=[]")
        return completion

    def _check_context(self, n_tokens: int, error: ContextLengthError) -> None:
        if self._max_model_len is not None and n_tokens <= self._max_model_len:
            raise EngineError(
                f"{self._url} calls a request of {n_tokens} tokens too long, but reports "
                f"max_model_len={self._max_model_len}; read the server's log: {error}"
            ) from error

    async def release(self, session: str) -> None:
        """Nothing to do: a server evicts its cache by itself."""

    async def sleep(self) -> None:
        """Nothing to do: the server does not share memory with the learner."""

    async def wake(self) -> None: ...
