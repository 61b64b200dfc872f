"""A LoopbackVllm of the wide speaker, reached as a run that trains it reaches it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.fakes.loopback_vllm import LoopbackVllm, replace_weights
from tests.fakes.serving import serving
from tests.fakes.tiny_policy import MODEL
from tests.fakes.wide_policy import LearnerOf, moved, wide_policy

from skyfleet.engines import http_client as posting
from skyfleet.engines import vllm_worker
from skyfleet.engines.openai_engine import OpenAIEngine
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.engines.vllm_routes import VllmRoutes
from skyfleet.engines.vllm_server import VllmServer, open_vllm_server
from skyfleet.models.loading import LoadedModel
from skyfleet.models.weights import read_model_sizes

PROMPT = [20 + i for i in range(12)]
SAMPLING = SamplingParams(max_generate_length=8, seed=1)


def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked again at once, and given weights without vLLM."""
    monkeypatch.setattr(posting, "INITIAL_BACKOFF_SECONDS", 0.01)
    monkeypatch.setattr(vllm_worker, "_replace", replace_weights)


def changed() -> LearnerOf:
    """With weights that the server does not have."""
    return LearnerOf(moved(0.05), 3)


def loopback(**lacks: Any) -> LoopbackVllm:
    policy_model = wide_policy()
    loaded = LoadedModel(module=policy_model.decoder.module, tokenizer=policy_model.tokenizer)
    return LoopbackVllm(loaded, **lacks)


@asynccontextmanager
async def reached(
    server: LoopbackVllm, *, may_sleep: bool = True, learner: dict[str, Any] | None = None
) -> AsyncIterator[VllmServer]:
    """`learner` is what its model has other than the server's."""
    async with (
        serving(server) as url,
        OpenAIEngine(f"{url}/v1", model=MODEL, tries=2) as policy_model,
        VllmRoutes(url) as routes,
    ):
        sizes = read_model_sizes(wide_policy().decoder.module.config) | (learner or {})
        yield await open_vllm_server(policy_model, routes, may_sleep=may_sleep, sizes=sizes)
