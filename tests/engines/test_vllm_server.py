"""A vLLM server is trained over HTTP: what it must have, what it is told, and who is to blame."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fakes.loopback_vllm import LoopbackVllm, replace_weights
from tests.fakes.serving import serving
from tests.fakes.small_models import logprobs_of
from tests.fakes.tiny_speaker import CAPACITY, MODEL, tiny_speaker

from skyfleet.engines import posting, vllm_worker
from skyfleet.engines.openai_engine import OpenAIEngine
from skyfleet.engines.posting import RefusedError
from skyfleet.engines.sampling import SamplingParams
from skyfleet.engines.vllm_routes import VllmRoutes
from skyfleet.engines.vllm_server import VllmServer, open_vllm_server
from skyfleet.errors import ConfigError, EngineError, ModelError, SentinelError
from skyfleet.learner.learner import Learner
from skyfleet.models.decoder import Decoder
from skyfleet.models.loading import Loaded
from skyfleet.weight_sync.vllm import VllmSync

PROMPT = [20 + i for i in range(12)]
SAMPLING = SamplingParams(max_generate_length=8, seed=1)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posting, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(vllm_worker, "_replace", replace_weights)


def loopback(**lacks: Any) -> LoopbackVllm:
    speaker = tiny_speaker()
    loaded = Loaded(module=speaker.decoder.module, tokenizer=speaker.tokenizer)
    return LoopbackVllm(loaded, **lacks)


@asynccontextmanager
async def reached(server: LoopbackVllm, *, may_sleep: bool = True) -> AsyncIterator[VllmServer]:
    async with (
        serving(server) as url,
        OpenAIEngine(f"{url}/v1", model=MODEL, tries=2) as speaker,
        VllmRoutes(url) as routes,
    ):
        yield await open_vllm_server(speaker, routes, may_sleep=may_sleep)


def moved() -> Decoder:
    """Weights that the server does not have."""
    module = deepcopy(tiny_speaker().decoder.module)
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(0.5)
    return Decoder(module, max_positions=CAPACITY)


class Taught:
    """A learner as far as a sync asks."""

    policy_version = 3


async def push(decoder: Decoder, *engines: VllmServer, folder: str | None = None) -> None:
    taught: Learner = Taught()  # type: ignore[assignment]
    sync = VllmSync(lambda: decoder.module.state_dict().items(), folder=folder)
    await sync.push(taught, engines)


@pytest.mark.parametrize(
    ("lacks", "sentence"),
    [
        ({"version": None}, r"is no vLLM, and a server that is trained is vLLM 0\.23 or newer"),
        ({"version": "0.22.1"}, r"runs vLLM 0\.22\.1, and a server that is trained is vLLM 0\.23"),
        ({"dev_mode": False}, "start it with VLLM_SERVER_DEV_MODE=1 in its environment"),
        (
            {"extension": False},
            "--worker-extension-cls skyfleet.engines.vllm_worker.WeightDoor, and",
        ),
        (
            {"logprobs_mode": "raw_logprobs"},
            "raw_logprobs, which .* --logprobs-mode processed_logp",
        ),
    ],
)
async def test_what_a_server_lacks_to_be_trained_is_one_sentence_with_the_way_out(
    lacks: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"^generator\.remote_inference_engine_urls: http://127\S+ .*{sentence}",
    ):
        async with reached(loopback(**lacks)):
            pass


async def test_a_server_that_fails_at_the_start_is_named() -> None:
    server = loopback()
    server.asleep, server.breaks = True, "wake_up"
    with pytest.raises(
        ConfigError, match=r"answer as it should \(RouteError: 500: wake_up broke\)"
    ):
        async with reached(server):
            pass


async def test_a_server_that_a_run_left_asleep_is_woken() -> None:
    server = loopback(sleep_mode=True)
    server.asleep = True
    async with reached(server):
        assert not server.asleep
    assert server.told == ["wake_up"]


async def test_weights_change_what_is_said_and_the_version_goes_with_each_turn() -> None:
    server = loopback()
    async with reached(server) as engine:
        before = await engine.generate(PROMPT, SAMPLING, session="s")
        await push(moved(), engine)
        after = await engine.generate(PROMPT, SAMPLING, session="s")
    assert (before.policy_version, after.policy_version) == (0, 3)
    assert server.salts == ["0", "3"]
    expected = logprobs_of(moved(), [*PROMPT, *after.token_ids], 8)
    assert after.logprobs == pytest.approx(expected.tolist(), abs=1e-5)
    assert server.told == ["pause keep true", "load", "resume"]


async def test_a_server_with_sleep_mode_gives_its_memory_to_the_learner() -> None:
    server = loopback(sleep_mode=True)
    async with reached(server) as engine:
        await engine.sleep()
        await push(moved(), engine)
        await engine.wake()
    assert server.told == ["sleep 2 wait", "wake_up weights", "load", "wake_up kv_cache"]


@pytest.mark.parametrize(("sleep_mode", "may_sleep"), [(False, True), (True, False)])
async def test_without_sleep_mode_or_apart_from_the_learner_it_keeps_its_memory(
    sleep_mode: bool, may_sleep: bool
) -> None:
    server = loopback(sleep_mode=sleep_mode)
    async with reached(server, may_sleep=may_sleep) as engine:
        await engine.sleep()
        await engine.wake()
    assert server.told == ["reset_prefix_cache"]


async def test_a_server_that_holds_other_weights_stops_the_run_by_name() -> None:
    good, bad = loopback(), loopback()
    bad.breaks = "sums"
    async with reached(good) as one, reached(bad) as other:
        with pytest.raises(SentinelError, match=rf"^after the sync {other.name} has other weights"):
            await push(moved(), one, other)


async def test_a_server_that_was_started_again_or_given_away_stops_the_run() -> None:
    server = loopback()
    async with reached(server) as engine:
        await push(moved(), engine)
        await push(moved(), engine)
        async with reached(server) as others:
            await push(moved(), others)
        with pytest.raises(
            SentinelError, match=r"^vLLM at \S+ was started again .* or another run"
        ):
            await push(moved(), engine)
        server.start_again()
        with pytest.raises(SentinelError, match="what it said in this step is not the policy's"):
            await push(moved(), engine)


async def test_weights_that_a_server_does_not_see_name_the_key_for_a_shared_folder() -> None:
    server = loopback()
    server.mounted_at = "/elsewhere"
    async with reached(server) as engine:
        with pytest.raises(ModelError, match=r"cannot be read there; set generator\.weight_sync_d"):
            await push(moved(), engine)
    assert server.told[-1] == "resume"


async def test_weights_travel_through_the_folder_that_is_named(tmp_path: Path) -> None:
    server = loopback()
    async with reached(server) as engine:
        with pytest.raises(
            ConfigError, match=r"weight_sync_dir='/no/such': nothing can be written"
        ):
            await push(moved(), engine, folder="/no/such")
        await push(moved(), engine, folder=str(tmp_path))
    (path,) = server.loaded
    assert Path(path).parent.parent == tmp_path
    assert os.listdir(tmp_path) == []


async def test_a_turn_that_fails_is_its_episodes_matter_unless_the_server_has_died() -> None:
    server = loopback()
    async with reached(server) as engine:
        with pytest.raises(RefusedError):
            await engine.generate([], SAMPLING, session="s")
        server.breaks = "completions"
        with pytest.raises(EngineError, match="no turns today"):
            await engine.generate(PROMPT, SAMPLING, session="s")
        server.is_healthy = False
        with pytest.raises(
            ModelError, match=r"^vLLM at http://\S+ has died: .*no turns today.*goes"
        ):
            await engine.generate(PROMPT, SAMPLING, session="s")


async def test_a_server_that_is_gone_stops_the_run() -> None:
    async with (
        OpenAIEngine("http://127.0.0.1:9/v1", model=MODEL, tries=2) as speaker,
        VllmRoutes("http://127.0.0.1:9") as routes,
    ):
        with pytest.raises(ConfigError, match=r"does not answer as it should \(ConnectError: "):
            await open_vllm_server(speaker, routes, may_sleep=True)
        gone = VllmServer(speaker, routes, sleeps=False, model_dtype="float32")
        with pytest.raises(ModelError, match=r"^vLLM at http://127\.0\.0\.1:9 has died: "):
            await gone.generate(PROMPT, SAMPLING, session="s")
        with pytest.raises(
            ModelError, match=r"^vLLM at \S+ was told to pause and failed: ConnectErr"
        ):
            await push(moved(), gone)


@pytest.mark.parametrize("fails", ["pause", "resume", "reset_prefix_cache"])
async def test_whatever_a_server_fails_at_besides_turns_stops_the_run(fails: str) -> None:
    server = loopback()
    server.breaks = fails

    async def step(engine: VllmServer) -> None:
        await engine.sleep()
        await push(moved(), engine)

    async with reached(server) as engine:
        with pytest.raises(ModelError, match=rf"and failed: RouteError: 500: {fails} broke"):
            await step(engine)
