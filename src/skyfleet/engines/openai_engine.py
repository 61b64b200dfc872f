"""Token-level completions from an OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from skyfleet.chat.transcript import Completion, Finish
from skyfleet.engines.http_client import Endpoint, bearer
from skyfleet.engines.sampling_params import SamplingParams, request_seed
from skyfleet.engines.versions import at_least
from skyfleet.errors import ConfigError, EngineError

SESSION_HEADER = "X-Session-ID"
"""As vLLM's router reads it, and our server."""

FIRST_WITH_TOKENS = "0.10.2"
"""The first vLLM that gives token ids."""


def body_fields(sampling: SamplingParams, *, session: str, position: int) -> dict[str, Any]:
    """Everything that decides a draw, said outright: a model's own defaults change nothing."""
    fields: dict[str, Any] = {
        "max_tokens": sampling.max_generate_length,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,
        "ignore_eos": True,  # what ends a turn stands in stop_token_ids
        "stop_token_ids": list(sampling.stop_token_ids),
        "skip_special_tokens": False,  # a stop string may hold one
        "return_token_ids": True,
    }
    if sampling.stop:
        fields |= {"stop": list(sampling.stop), "include_stop_str_in_output": True}
    if sampling.seed is not None:
        fields["seed"] = request_seed(sampling.seed, session, position)
    return fields


def completion_of(
    choice: Mapping[str, Any], logprobs: Sequence[float | None], *, policy_version: int
) -> Completion:
    token_ids = tuple(choice["token_ids"])
    known = tuple(logprob for logprob in logprobs if logprob is not None)
    if len(known) != len(token_ids):
        raise EngineError(f"{len(token_ids)} token ids came back with {len(known)} logprobs")
    return Completion(
        token_ids=token_ids,
        logprobs=known,
        finish=_CUT_SHORT.get(choice.get("finish_reason") or "", "stop"),
        policy_version=policy_version,
    )


def version_of(answer: Mapping[str, Any], otherwise: int) -> int:
    """The policy version that the server sampled with; vLLM does not know of any."""
    told = answer.get("policy_version")
    return told if isinstance(told, int) else otherwise


async def no_tokens(client: httpx.AsyncClient, url: str) -> ConfigError:
    """Why nothing can be trained on this server, and what can be done."""
    return ConfigError(
        f"{url} answered without token ids{await _vllm_note(client, url)}, so its episodes are for "
        "evaluation only (skyfleet evaluate --endpoint); to train on them serve the model with "
        f"vLLM {FIRST_WITH_TOKENS} or newer, or with skyfleet serve"
    )


async def _vllm_note(client: httpx.AsyncClient, url: str) -> str:
    try:
        answer = (await client.get(httpx.URL(url).join("/version"), timeout=5)).json()
    except (httpx.HTTPError, ValueError):
        return ""
    version = answer.get("version") if isinstance(answer, dict) else None
    if not isinstance(version, str):
        return ""
    old = "" if at_least(version, FIRST_WITH_TOKENS) else " is too old for them"
    return f" (vLLM {version}{old})"


_CUT_SHORT: Mapping[str, Finish] = {"length": "length", "abort": "abort"}


class OpenAIEngine(Endpoint):
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
        """`url` ends where /completions begins: http://localhost:8000/v1."""
        super().__init__(
            f"{url.rstrip('/')}/completions",
            bearer(api_key),
            timeout_seconds=timeout_seconds,
            max_concurrent=max_concurrent,
            tries=tries,
        )
        self.model = model
        self.policy_version = 0
        """Recorded on completions, unless the server tells its own."""

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        session: str,
        cache_salt: str | None = None,
    ) -> Completion:
        """ConfigError where the server gives no token ids. `cache_salt` is vLLM's alone."""
        version = self.policy_version
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(token_ids),
            "logprobs": 0,  # the chosen token's alone
            **body_fields(sampling, session=session, position=len(token_ids)),
        }
        if cache_salt is not None:
            body["cache_salt"] = cache_salt
        answer = await self.post(body, {SESSION_HEADER: session})
        match answer:
            case {"choices": [{"token_ids": list()} as choice, *_]}:
                told = (choice.get("logprobs") or {}).get("token_logprobs") or ()
                return completion_of(choice, told, policy_version=version_of(answer, version))
        async with self.connection() as client:
            raise await no_tokens(client, self._url)

    async def release(self, session: str) -> None:
        """A server drops the oldest of its cache by itself."""

    async def sleep(self) -> None:
        """The server's memory is not the learner's."""

    async def wake(self) -> None: ...
