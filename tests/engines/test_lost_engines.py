"""An engine that is trained dies: the others go on without it, and the last one stops the run."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from tests.fakes.reached_vllm import (
    PROMPT,
    SAMPLING,
    changed,
    loopback,
    reached,
    without_vllm,
)

from skyfleet.chat.transcript import Completion
from skyfleet.engines.engine_pool import Router, tell_living
from skyfleet.engines.openai_engine import OpenAIEngine
from skyfleet.engines.vllm_server import VllmServer
from skyfleet.errors import EngineError, EngineLostError, ModelError


@pytest.fixture(autouse=True)
def _without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    without_vllm(monkeypatch)


async def test_its_sessions_go_on_elsewhere_and_it_is_not_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dead, alive = loopback(), loopback()
    async with reached(dead) as one, reached(alive) as other:
        router = Router([one, other])
        whole = await other.generate(PROMPT, SAMPLING, session="s")
        dead.breaks, dead.is_healthy = "completions", False
        with caplog.at_level(logging.WARNING):
            said = await router.generate(PROMPT, SAMPLING, session="s")
        assert said.token_ids == whole.token_ids
        assert "engine 0, which is not asked again in this run, failed and session s" in caplog.text
        # Started again by whoever watches over it: with the weights of its beginning.
        dead.breaks, dead.is_healthy = "", True
        n_told, n_asked = len(dead.told), len(dead.salts)
        for session in ("s", "t", "u"):
            await router.generate(PROMPT, SAMPLING, session=session)
        await router.sleep()
        await router.wake()
        learner = changed()
        sync = learner.sync()
        assert await sync.push(learner, [one, other]) == 3  # type: ignore[arg-type]
        await sync.confirm([one, other])
        assert (len(dead.told), len(dead.salts)) == (n_told, n_asked)
        assert router.policy_version == 3
        with pytest.raises(EngineLostError, match=rf"^{one.name} has died; start it again, and"):
            await one.generate(PROMPT, SAMPLING, session="v")


async def test_the_last_one_stops_the_run() -> None:
    servers = loopback(), loopback()
    async with reached(servers[0]) as one, reached(servers[1]) as other:
        router = Router([one, other])
        for server in servers:
            server.breaks, server.is_healthy = "completions", False
        with pytest.raises(EngineLostError, match=r"^vLLM at http\S+ has died: .*no turns today"):
            await router.generate(PROMPT, SAMPLING, session="s")
        with pytest.raises(
            EngineLostError, match=rf"^every engine has died \({one.name}, {other.name}\); start"
        ):
            await router.generate(PROMPT, SAMPLING, session="t")
        with pytest.raises(ModelError, match="every engine has died"):
            await changed().push(one, other)


async def test_a_turn_that_the_others_fail_at_is_its_episodes_matter() -> None:
    dead, busy = loopback(), loopback()
    async with reached(dead) as one, reached(busy) as other:
        dead.breaks, dead.is_healthy = "completions", False
        busy.breaks = "completions"
        with pytest.raises(EngineError, match="no turns today"):
            await Router([one, other]).generate(PROMPT, SAMPLING, session="s")


@pytest.mark.parametrize("at", ["pause", "collective_rpc", "resume"])
async def test_weights_reach_the_others_where_it_dies_of_them(
    at: str, caplog: pytest.LogCaptureFixture
) -> None:
    dead, alive = loopback(), loopback()
    async with reached(dead) as one, reached(alive) as other:
        learner = changed()
        sync = learner.sync()
        dead.breaks, dead.is_healthy = at, False
        with caplog.at_level(logging.WARNING):
            await sync.push(learner, [one, other])  # type: ignore[arg-type]
        assert f"the others go on without it in this run: {one.name} was told to" in caplog.text
        assert one.is_lost
        assert not other.is_lost
        assert other.policy_version == 3
        await sync.confirm([one, other])


async def test_one_that_dies_before_it_is_asked_what_it_has_is_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dead = loopback()
    async with reached(dead) as one, reached(loopback()) as other:
        learner = changed()
        sync = learner.sync()
        await sync.push(learner, [one, other])  # type: ignore[arg-type]
        dead.breaks, dead.is_healthy = "collective_rpc", False
        await sync.confirm([one, other])
    assert "the others go on without it" in caplog.text


async def test_one_that_fails_and_lives_stops_the_run_though_another_died() -> None:
    dead, odd = loopback(), loopback()
    async with reached(dead) as one, reached(odd) as other:
        dead.breaks, dead.is_healthy = "reset_prefix_cache", False
        odd.breaks = "reset_prefix_cache"
        with pytest.raises(ModelError, match=rf"^{other.name} was told to drop its cache"):
            await tell_living([one, other], VllmServer.sleep)


async def test_one_that_came_up_again_while_it_was_asked_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two turns fail; the first finds it dead, and the second is answered when it is up again."""
    server = loopback()
    async with reached(server) as engine:
        generate = OpenAIEngine.generate

        async def meanwhile(self: OpenAIEngine, *args: Any, **kwargs: Any) -> Completion:
            said = await generate(self, *args, **kwargs)
            engine.is_lost = True
            return said

        monkeypatch.setattr(OpenAIEngine, "generate", meanwhile)
        with pytest.raises(EngineLostError, match="has died; start it again"):
            await engine.generate(PROMPT, SAMPLING, session="s")
        server.breaks = "reset_prefix_cache"  # it lives, and what it fails at is the lost one's
        with pytest.raises(EngineLostError):
            await engine.sleep()
        assert engine.is_lost


async def test_nobody_waits_for_one_that_died_asleep() -> None:
    server = loopback(sleep_mode=True)
    async with reached(server) as engine:
        server.breaks, server.is_healthy = "sleep", False
        with pytest.raises(EngineLostError):
            await engine.sleep()
        with pytest.raises(EngineLostError):
            await engine.generate(PROMPT, SAMPLING, session="s")
