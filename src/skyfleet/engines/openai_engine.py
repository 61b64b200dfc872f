"""OpenAIEngine: token-level completions from an OpenAI-compatible server, such as vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from skyfleet.chat.transcript import Completion, Finish
from skyfleet.engines.http_client import RetryingClient, auth_header
from skyfleet.engines.sampling_params import SamplingParams, request_seed
from skyfleet.engines.vllm_versions import MIN_VLLM_WITH_TOKEN_IDS, is_at_least
from skyfleet.errors import ConfigError, EngineError

SESSION_HEADER = "X-Session-ID"
"""The header that vLLM's router and `skyfleet serve` read."""
_FINISH_REASONS: Mapping[str, Finish] = {"length": "length", "abort": "abort"}


def sampling_fields(sampling: SamplingParams, *, session: str, position: int) -> dict[str, Any]:
    """All sampling fields of a request, so that the server's defaults change nothing."""
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


def parse_completion(
    choice: Mapping[str, Any], logprobs: Sequence[float | None], *, policy_version: int
) -> Completion:
    token_ids = tuple(choice["token_ids"])
    known = tuple(logprob for logprob in logprobs if logprob is not None)
    if len(known) != len(token_ids):
        raise EngineError(
            f"the server returned {len(token_ids)} token ids with {len(known)} logprobs"
        )
    return Completion(
        token_ids=token_ids,
        logprobs=known,
        finish=_FINISH_REASONS.get(choice.get("finish_reason") or "", "stop"),
        policy_version=policy_version,
    )


def parse_policy_version(answer: Mapping[str, Any], default: int) -> int:
    """The policy version that the server reports; vLLM reports none."""
    version = answer.get("policy_version")
    return version if isinstance(version, int) else default


async def missing_token_ids_error(client: httpx.AsyncClient, url: str) -> ConfigError:
    """The error for a server that returns no token ids, with its vLLM version and the remedy."""
    return ConfigError(
        f"{url} returned no token ids{await _describe_vllm(client, url)}, so it can only be "
        "evaluated (skyfleet evaluate --endpoint); to get token ids, serve the model with vLLM "
        f"{MIN_VLLM_WITH_TOKEN_IDS} or newer, or with skyfleet serve"
    )


async def _describe_vllm(client: httpx.AsyncClient, url: str) -> str:
    try:
        answer = (await client.get(httpx.URL(url).join("/version"), timeout=5)).json()
    except (httpx.HTTPError, ValueError):
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
    ) -> None:
        """`url` is the base URL, without /completions: http://localhost:8000/v1."""
        super().__init__(
            f"{url.rstrip('/')}/completions",
            auth_header(api_key),
            timeout_seconds=timeout_seconds,
            max_concurrent=max_concurrent,
            tries=tries,
        )
        self.model = model
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
        answer = await self.post(body, {SESSION_HEADER: session})
        match answer:
            case {"choices": [{"token_ids": list()} as choice, *_]}:
                logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or ()
                version = parse_policy_version(answer, version)
                return parse_completion(choice, logprobs, policy_version=version)
        async with self.connection() as client:
            raise await missing_token_ids_error(client, self._url)

    async def release(self, session: str) -> None:
        """Nothing to do: a server evicts its cache by itself."""

    async def sleep(self) -> None:
        """Nothing to do: the server does not share memory with the learner."""

    async def wake(self) -> None: ...
