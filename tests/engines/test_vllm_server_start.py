"""What a vLLM server must have before it can be trained or evaluated."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.responses import Response
from tests.fakes.loopback_vllm import MEMORY
from tests.fakes.serving import serving
from tests.fakes.vllm_clients import loopback, reached

from skyfleet.engines.vllm_routes import VllmRoutes
from skyfleet.engines.vllm_server import reject_sleeping_server
from skyfleet.errors import ConfigError


@pytest.mark.parametrize(
    ("lacks", "sentence"),
    [
        ({"version": None}, r"is not a vLLM server, but training needs vLLM 0\.23 or newer"),
        ({"version": "0.22.1"}, r"runs vLLM 0\.22\.1, but training needs vLLM 0\.23"),
        ({"dev_mode": False}, "start it with VLLM_SERVER_DEV_MODE=1 in its environment"),
        (
            {"extension": False},
            "--worker-extension-cls skyfleet.engines.vllm_worker.WeightUpdateExtension$",
        ),
        (
            {"logprobs_mode": "raw_logprobs"},
            "raw_logprobs, which .* --logprobs-mode processed_logp",
        ),
        ({"quantization": "fp8"}, "runs with quantization fp8, so .* start it without"),
        ({"n_workers": 2}, r"runs 2 workers in each of 1 replicas, .* --tensor-parallel-size"),
        ({"n_replicas": 4}, r"runs 1 workers in each of 4 replicas, .* --data-parallel-size 1"),
    ],
)
async def test_what_a_server_lacks_to_be_trained_is_one_sentence_with_the_remedy(
    lacks: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"^generator\.remote_inference_engine_urls: http://127\S+ .*{sentence}",
    ):
        async with reached(loopback(**lacks)):
            pass


@pytest.mark.parametrize(
    ("learner", "sentence"),
    [
        ({"num_hidden_layers": 1}, "num_hidden_layers=2, but the learner's has 1;"),
        ({"intermediate_size": 64}, "intermediate_size=48, but the learner's has 64;"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=True, but the learner's has False;"),
    ],
)
async def test_a_server_of_another_model_is_rejected_with_both_values(
    learner: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(
        ConfigError, match=rf"{sentence} start it from trainer\.policy\.model\.path"
    ):
        async with reached(loopback(), learner=learner):
            pass


async def test_an_incompatible_worker_extension_names_the_version_to_install() -> None:
    server = loopback()
    server.breaks = "about"
    with pytest.raises(
        ConfigError,
        match=r"incompatible skyfleet worker extension \(field sizes is missing .*install skyfleet \S+ there",
    ):
        async with reached(server):
            pass


async def test_a_server_that_is_still_loading_should_be_tried_again() -> None:
    async def unready(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await Response("loading", status_code=503)(scope, receive, send)

    with pytest.raises(ConfigError, match=r"503: loading\); try again when it is up"):
        async with reached(unready):  # type: ignore[arg-type]
            pass


async def test_a_server_that_fails_to_wake_is_named() -> None:
    server = loopback()
    server.asleep, server.breaks = [*MEMORY], "wake_up"
    with pytest.raises(ConfigError, match=r"respond correctly \(RouteError: 500: wake_up broke\)"):
        async with reached(server):
            pass


async def test_a_sleeping_server_is_woken_for_training() -> None:
    server = loopback(sleep_mode=True)
    server.asleep = [*MEMORY]
    async with reached(server):
        assert not server.asleep
    assert server.received == ["wake_up"]


async def test_a_sleeping_server_is_rejected_for_evaluation() -> None:
    server = loopback()
    async with serving(server) as url, VllmRoutes(url) as routes:
        await reject_sleeping_server(routes)
        server.asleep = [*MEMORY]
        with pytest.raises(
            ConfigError, match=r"is asleep or paused, .* resume that run, or restart the server"
        ):
            await reject_sleeping_server(routes)
    async with serving(loopback(dev_mode=False)) as url, VllmRoutes(url) as routes:
        await reject_sleeping_server(routes)
