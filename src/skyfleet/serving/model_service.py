"""Served: one model as its endpoints see it, and what a request's body asks of it."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from time import time
from typing import Any
from uuid import uuid4

from skyfleet.chat.renderer import Renderer
from skyfleet.chat.transcript import Completion
from skyfleet.engines.engine import Engine
from skyfleet.engines.sampler import finish_of
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.serving.generation import ServerMetrics, Sessions
from skyfleet.serving.requests import B, BaseRequest, ApiError, parse_request
from skyfleet.serving.token_cache import TokenCache

SLICE_TOKENS = 8
"""Tokens that a stream sends at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    prompt: list[int]
    sampling: SamplingParams
    session: str


class GenerationService:
    def __init__(self, engine: Engine, renderer: Renderer, *, max_sessions: int) -> None:
        self._engine, self._renderer = engine, renderer
        self.sessions = Sessions(engine, max_idle=max_sessions)
        self.counters = ServerMetrics()

    @property
    def version(self) -> int:
        return self._engine.policy_version

    async def whole(self, ask: GenerateRequest) -> Completion:
        with self.counters.turn(len(ask.prompt)):
            async with self.sessions.acquire(ask.session):
                said = await self._engine.generate(ask.prompt, ask.sampling, session=ask.session)
            self.counters.generated_tokens += len(said.token_ids)
        return said

    async def slices(self, ask: GenerateRequest) -> AsyncIterator[tuple[Completion, bool]]:
        """Each with whether it is the last. An engine need not know of streams for this.

        A seed draws other tokens than in one piece: every slice begins at a position of its own.
        """
        said: list[int] = []
        is_last = False
        with self.counters.turn(len(ask.prompt)):
            async with self.sessions.acquire(ask.session):
                while not is_last:
                    left = ask.sampling.max_generate_length - len(said)
                    sampling = replace(ask.sampling, max_generate_length=min(SLICE_TOKENS, left))
                    part = await self._engine.generate(
                        [*ask.prompt, *said], sampling, session=ask.session
                    )
                    part, is_last = self._heard(part, said, ask.sampling)
                    self.counters.generated_tokens += len(part.token_ids)
                    yield part, is_last

    def _heard(
        self, part: Completion, said: list[int], sampling: SamplingParams
    ) -> tuple[Completion, bool]:
        """`said` grows by the slice, up to where the turn ends.

        A stop string that began in an earlier slice ends it too, which the engine cannot see.
        """
        finish, n_before = None, len(said)
        for token in part.token_ids:
            said.append(token)
            finish = finish_of(sampling, said, self._renderer.text)
            if finish is not None:
                break
        n = len(said) - n_before
        kept = replace(
            part,
            token_ids=part.token_ids[:n],
            logprobs=part.logprobs[:n],
            finish=finish or part.finish,
        )
        return kept, kept.finish != "length" or finish is not None


class ModelService:
    def __init__(
        self,
        renderer: Renderer,
        generation: GenerationService,
        *,
        encode: Callable[[str], list[int]],
        model: str,
        max_model_len: int,
        template_kwargs: Mapping[str, Any],
    ) -> None:
        self.renderer, self.generation, self.encode = renderer, generation, encode
        self.token_cache = TokenCache(renderer)
        self._model, self._max_model_len = model, max_model_len
        self._template_kwargs = template_kwargs

    async def models(self) -> dict[str, Any]:
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "skyfleet"}
        told = {"max_model_len": self._max_model_len, "policy_version": self.generation.version}
        return {"object": "list", "data": [{**model, **told}]}

    def read(self, raw: bytes, kind: type[B]) -> B:
        body = parse_request(raw, kind, template_kwargs=self._template_kwargs)
        if body.model != self._model:
            raise ApiError(
                f"model={body.model!r} is not served; {self._model!r} is",
                status=404,
                param="model",
                code="model_not_found",
            )
        return body

    def build_requests(
        self,
        body: BaseRequest,
        prompts: Sequence[list[int]],
        max_tokens: int | None,
        *,
        session: str | None,
        thread: str | None = None,
    ) -> list[GenerateRequest]:
        """`n` for every prompt. `thread` is a session that has the beginning, if it is free."""
        if body.stream and (len(prompts) > 1 or body.n > 1):
            raise ApiError("stream=true answers one prompt with n=1; ask again for more")
        build_requests: list[GenerateRequest] = []
        for prompt in prompts:
            sampling = self._sampling(body, self._room(prompt, max_tokens))
            name = session or self._session(prompt, body.seed, thread)
            for _ in range(body.n):
                # One session cannot speak twice at once, and would say the same.
                mine = f"{name}#{len(asks)}" if build_requests else name
                build_requests.append(GenerateRequest(prompt=prompt, sampling=sampling, session=mine))
        return build_requests

    async def whole(self, build_requests: Sequence[GenerateRequest]) -> list[Completion]:
        return await asyncio.gather(*(self.generation.whole(ask) for ask in build_requests))

    def fields(self, prefix: str, kind: str) -> dict[str, Any]:
        return {
            "id": f"{prefix}-{uuid4().hex}",
            "object": kind,
            "created": int(time()),
            "model": self._model,
        }

    def _room(self, prompt: Sequence[int], max_tokens: int | None) -> int:
        left = self._max_model_len - len(prompt)
        if not prompt or left < (max_tokens or 1):
            asked = "" if max_tokens is None else f" + max_tokens={max_tokens}"
            raise ApiError(
                f"{len(prompt)} prompt tokens{asked} do not fit: this model takes 1 or more and "
                f"{self._max_model_len} in all",
                param="messages" if max_tokens is None else "max_tokens",
                code="context_length_exceeded",
            )
        return max_tokens or left

    def _sampling(self, body: BaseRequest, max_tokens: int) -> SamplingParams:
        ends = () if body.ignore_eos else self.renderer.stop_token_ids
        return SamplingParams(
            max_generate_length=max_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k or -1,
            min_p=body.min_p,
            stop=body.stop_strings,
            stop_token_ids=tuple(dict.fromkeys((*body.stop_token_ids, *ends))),
            seed=body.seed,
        )

    def _session(self, prompt: Sequence[int], seed: int | None, thread: str | None) -> str:
        """A session's name has a part in its draws: the same seed and prompt, the same name."""
        if seed is not None:
            try:
                written = array("q", prompt).tobytes()
            except OverflowError:
                raise ApiError("the prompt holds a number that is no token id") from None
            return f"seeded-{blake2b(written, digest_size=16).hexdigest()}"
        if thread is not None and self.generation.sessions.is_free(thread):
            return thread
        return f"nameless-{uuid4().hex}"
