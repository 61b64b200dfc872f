"""A vLLM server is trained over HTTP: control calls, verification of weights, and failures."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from tests.fakes.small_models import logprobs_of
from tests.fakes.tiny_policy import MODEL
from tests.fakes.vllm_clients import (
    PROMPT,
    SAMPLING,
    changed,
    loopback,
    reached,
    without_vllm,
)
from tests.fakes.wide_policy import LearnerOf, moved, wide_policy

from skyfleet.engines import vllm_worker
from skyfleet.engines.http_client import RequestRejectedError
from skyfleet.engines.openai_engine import OpenAIEngine
from skyfleet.engines.vllm_routes import VllmRoutes
from skyfleet.engines.vllm_server import VllmServer, open_vllm_server
from skyfleet.errors import ConfigError, EngineError, ModelError, SentinelError


@pytest.fixture(autouse=True)
def _without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    without_vllm(monkeypatch)


async def test_pushed_weights_change_samples_and_each_turn_has_its_version() -> None:
    server = loopback()
    async with reached(server) as engine:
        before = await engine.generate(PROMPT, SAMPLING, session="s")
        await changed().push(engine)
        after = await engine.generate(PROMPT, SAMPLING, session="s")
    assert (before.policy_version, after.policy_version) == (0, 3)
    assert server.salts == ["0", "3"]
    expected = logprobs_of(moved(0.05), [*PROMPT, *after.token_ids], 8)
    assert after.logprobs == pytest.approx(expected.tolist(), abs=1e-5)
    assert server.received == ["pause keep true", "load", "resume"]


async def test_a_server_with_sleep_mode_frees_memory_for_the_learner() -> None:
    server = loopback(sleep_mode=True)
    async with reached(server) as engine:
        await engine.sleep()
        turn = asyncio.create_task(engine.generate(PROMPT, SAMPLING, session="s"))
        await changed().push(engine)
        assert not turn.done()
        await engine.wake()
        assert (await turn).policy_version == 3
    assert server.received == ["sleep 2 wait", "wake_up weights", "load", "wake_up kv_cache"]


async def test_a_server_without_weights_does_not_generate() -> None:
    async with reached(loopback(sleep_mode=True)) as engine:
        await engine.sleep()
        await engine.wake()
        with pytest.raises(ConfigError, match=r"vLLM at \S+ dropped its weights at sleep level 2"):
            await engine.generate(PROMPT, SAMPLING, session="s")


@pytest.mark.parametrize(("sleep_mode", "may_sleep"), [(False, True), (True, False)])
async def test_without_sleep_mode_or_colocation_a_server_keeps_its_memory(
    sleep_mode: bool, may_sleep: bool
) -> None:
    server = loopback(sleep_mode=sleep_mode)
    async with reached(server, may_sleep=may_sleep) as engine:
        await engine.sleep()
        await engine.wake()
    assert server.received == ["reset_prefix_cache"]


async def test_a_server_with_a_different_tensor_stops_the_run_and_names_it() -> None:
    good, bad = loopback(), loopback()
    bad.breaks = "sums"
    async with reached(good) as one, reached(bad) as other:
        with pytest.raises(
            SentinelError,
            match=rf"^after the sync, {other.name} holds weights that differ from the learner's: "
            r"1 of 24 tensors, first model\.norm\.weight; restart it",
        ):
            await changed().push(one, other)


async def test_missing_tensors_are_detected_even_if_none_can_be_read_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with LoRA, which changes only projections; they are packed on a CPU."""
    monkeypatch.setattr(vllm_worker, "_find_held", lambda *_: None)
    async with reached(loopback()) as engine:
        await LearnerOf(wide_policy().decoder, 4).push(engine)
        monkeypatch.setattr(VllmServer, "update_weights", never)
        with pytest.raises(
            SentinelError, match=r"received weights that differ.*: 14 of 24 tensors, first \S+_proj"
        ):
            await LearnerOf(moved(0.05, only="_proj.weight"), 5).push(engine)


async def never(*_: object, policy_version: int) -> None: ...


async def test_a_restarted_or_reused_server_stops_the_run() -> None:
    server, learner = loopback(), changed()
    sync = learner.sync()
    async with reached(server) as engine:
        await sync.push(learner, [engine])  # type: ignore[arg-type]
        await sync.verify([engine])
        async with reached(server) as others:
            await LearnerOf(wide_policy().decoder, 9).push(others)
        with pytest.raises(
            SentinelError,
            match=r"^vLLM at \S+ received weights that differ.* 24 of 24 .* or another run pushed",
        ):
            await sync.verify([engine])
        await sync.push(learner, [engine])  # type: ignore[arg-type]
        server.start_again()
        with pytest.raises(SentinelError, match="samples since then are not from this policy"):
            await sync.verify([engine])


async def test_an_unreadable_weights_file_names_the_key_for_a_shared_folder() -> None:
    server = loopback()
    server.mounted_at = "/elsewhere"
    async with reached(server) as engine:
        with pytest.raises(
            ModelError,
            match=r"not readable by user \d+ of the vLLM server \(No such file .*set generator\.weight_sync_dir",
        ):
            await changed().push(engine)
    assert server.received[-1] == "resume"


async def test_weights_are_written_to_the_configured_folder(tmp_path: Path) -> None:
    server = loopback()
    async with reached(server) as engine:
        with pytest.raises(
            ConfigError, match=r"weight_sync_dir='/no/such': \d+ bytes of weights cannot be"
        ):
            await changed().push(engine, folder="/no/such")
        await changed().push(engine, folder=str(tmp_path))
    (path,) = server.loaded
    assert Path(path).parent.parent == tmp_path
    assert os.listdir(tmp_path) == []


async def test_a_failed_turn_fails_its_episode_unless_the_server_is_dead() -> None:
    server = loopback()
    async with reached(server) as engine:
        server.is_healthy = False
        with pytest.raises(
            RequestRejectedError
        ):  # a server that rejects a request is alive, even if its health check fails
            await engine.generate([], SAMPLING, session="s")
        server.is_healthy, server.breaks = True, "completions"
        with pytest.raises(EngineError, match="no turns today"):
            await engine.generate(PROMPT, SAMPLING, session="s")
        server.is_healthy = False
        with pytest.raises(
            ModelError, match=r"^vLLM at http://\S+ is dead: .*no turns today.*resume"
        ):
            await engine.generate(PROMPT, SAMPLING, session="s")


async def test_the_first_failure_is_reported_if_resuming_fails_too() -> None:
    server = loopback()
    server.mounted_at, server.breaks = "/elsewhere", "resume"
    async with reached(server) as engine:
        with pytest.raises(ModelError, match="failed to run skyfleet_load_file"):
            await changed().push(engine)
    assert server.received[-1] == "resume"


async def test_an_unreachable_server_stops_the_run() -> None:
    async with (
        OpenAIEngine("http://127.0.0.1:9/v1", model=MODEL, tries=2) as policy_model,
        VllmRoutes("http://127.0.0.1:9") as routes,
    ):
        with pytest.raises(ConfigError, match=r"does not respond correctly \(ConnectError: "):
            await open_vllm_server(policy_model, routes, may_sleep=True, sizes={})
        gone = VllmServer(policy_model, routes, sleeps=False, model_dtype="float32")
        with pytest.raises(ModelError, match=r"^vLLM at http://127\.0\.0\.1:9 is dead: "):
            await gone.generate(PROMPT, SAMPLING, session="s")
        with pytest.raises(ModelError, match=r"^vLLM at \S+ failed to pause: ConnectErr"):
            await changed().push(
                VllmServer(policy_model, routes, sleeps=False, model_dtype="float32")
            )


@pytest.mark.parametrize("fails", ["pause", "resume", "reset_prefix_cache"])
async def test_a_failed_control_call_stops_the_run(fails: str) -> None:
    server = loopback()
    server.breaks = fails

    async def step(engine: VllmServer) -> None:
        await engine.sleep()
        await changed().push(engine)

    async with reached(server) as engine:
        with pytest.raises(ModelError, match=rf"failed to .*: RouteError: 500: {fails} broke"):
            await step(engine)
