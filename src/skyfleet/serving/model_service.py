"""ModelService: one served model, and how a request becomes generation requests."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from time import time
from typing import Any
from uuid import uuid4

from skyfleet.chat.renderer import Renderer
from skyfleet.chat.transcript import Completion
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.serving.generation import GenerateRequest, GenerationService
from skyfleet.serving.guided_decoding import GuidedDecoding
from skyfleet.serving.requests import ApiError, BaseRequest, RequestT, parse_request
from skyfleet.serving.token_cache import TokenCache


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
        vocab_size: int | None = None,
    ) -> None:
        """`vocab_size` is that of the engine's model; None if it is not in this process."""
        self.renderer, self.generation, self.encode = renderer, generation, encode
        self.token_cache = TokenCache(renderer)
        self.guided_decoding = GuidedDecoding(renderer, vocab_size=vocab_size)
        self._model, self._max_model_len = model, max_model_len
        self._template_kwargs = template_kwargs

    async def list_models(self) -> dict[str, Any]:
        model = {
            "id": self._model,
            "object": "model",
            "created": 0,
            "owned_by": "skyfleet",
            "max_model_len": self._max_model_len,
            "policy_version": self.generation.policy_version,
        }
        return {"object": "list", "data": [model]}

    def parse(self, raw: bytes, kind: type[RequestT]) -> RequestT:
        request = parse_request(raw, kind, template_kwargs=self._template_kwargs)
        if request.model != self._model:
            raise ApiError(
                f"model={request.model!r} is not served; use {self._model!r}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return request

    def build_requests(
        self,
        request: BaseRequest,
        prompts: Sequence[list[int]],
        max_tokens: int | None,
        *,
        client_session: str | None,
        cached_session: str | None = None,
    ) -> list[GenerateRequest]:
        """`n` requests per prompt. `cached_session` holds the prefix and is used if it is free."""
        if request.stream and len(prompts) > 1:
            raise ApiError("stream=true supports one prompt; send one request per prompt")
        requests: list[GenerateRequest] = []
        for prompt in prompts:
            sampling = self._build_sampling(request, self._max_new_tokens(prompt, max_tokens))
            name = client_session or self._choose_session(prompt, request.seed, cached_session)
            for _ in range(request.n):
                # One session generates one turn at a time, and would sample the same tokens.
                session = f"{name}#{len(requests)}" if requests else name
                requests.append(GenerateRequest(prompt=prompt, sampling=sampling, session=session))
        return requests

    async def generate_all(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        return await asyncio.gather(*map(self.generation.generate, requests))

    def response_fields(self, prefix: str, kind: str) -> dict[str, Any]:
        return {
            "id": f"{prefix}-{uuid4().hex}",
            "object": kind,
            "created": int(time()),
            "model": self._model,
        }

    def _max_new_tokens(self, prompt: Sequence[int], max_tokens: int | None) -> int:
        left = self._max_model_len - len(prompt)
        if not prompt or left < (max_tokens or 1):
            requested = "" if max_tokens is None else f" + max_tokens={max_tokens}"
            raise ApiError(
                f"{len(prompt)} prompt tokens{requested} do not fit: this model takes at least 1 "
                f"prompt token and {self._max_model_len} tokens in total",
                param="messages" if max_tokens is None else "max_tokens",
                code="context_length_exceeded",
            )
        return max_tokens or left

    def _build_sampling(self, request: BaseRequest, max_tokens: int) -> SamplingParams:
        ends = () if request.ignore_eos else self.renderer.stop_token_ids
        return SamplingParams(
            max_generate_length=max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k or -1,
            min_p=request.min_p,
            stop=request.stop_strings,
            stop_token_ids=tuple(dict.fromkeys((*request.stop_token_ids, *ends))),
            seed=request.seed,
        )

    def _choose_session(
        self, prompt: Sequence[int], seed: int | None, cached_session: str | None
    ) -> str:
        """Sampling depends on the session name: the same seed and prompt get the same name."""
        if seed is not None:
            try:
                packed = array("q", prompt).tobytes()
            except OverflowError:
                raise ApiError("the prompt contains a number that is no token id") from None
            return f"seeded-{blake2b(packed, digest_size=16).hexdigest()}"
        if cached_session is not None and self.generation.sessions.is_free(cached_session):
            return cached_session
        return f"nameless-{uuid4().hex}"
