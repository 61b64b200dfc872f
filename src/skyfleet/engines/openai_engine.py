"""OpenAIEngine: an Engine behind /v1/completions of vLLM, `skyfleet serve`, or a server like them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skyfleet.chat.completion import Completion
from skyfleet.engines.openai_tokens import (
    SESSION_HEADER,
    body_fields,
    completion_of,
    no_tokens,
    version_of,
)
from skyfleet.engines.posting import Endpoint, bearer
from skyfleet.engines.sampling import SamplingParams


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
