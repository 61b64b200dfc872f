"""A dead engine: the run continues without it, and stops when every engine is dead."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from tests.fakes.vllm_clients import (
    PROMPT,
    SAMPLING,
    changed,
    loopback,
    reached,
    without_vllm,
)

from skyfleet.chat.transcript import Completion
from skyfleet.engines.engine_pool import EnginePool, broadcast
from skyfleet.engines.openai_engine import OpenAIEngine
from skyfleet.engines.vllm_server import VllmServer
from skyfleet.errors import EngineError, EngineLostError, ModelError


@pytest.fixture(autouse=True)
def _without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    without_vllm(monkeypatch)


async def test_sessions_of_a_dead_engine_move_and_it_is_not_used_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dead, alive = loopback(), loopback()
    async with reached(dead) as one, reached(alive) as other:
        pool = EnginePool([one, other])
        whole = await other.generate(PROMPT, SAMPLING, session="s")
        dead.breaks, dead.is_healthy = "completions", False
        with caplog.at_level(logging.WARNING):
            completion = await pool.generate(PROMPT, SAMPLING, session="s")
        assert completion.token_ids == whole.token_ids
        assert (
            "engine 0 failed and is not used again, session s continues on engine 1" in caplog.text
        )
        # A supervisor restarts it, with its initial weights.
        dead.breaks, dead.is_healthy = "", True
        n_calls, n_turns = len(dead.received), len(dead.salts)
        for session in ("s", "t", "u"):
            await pool.generate(PROMPT, SAMPLING, session=session)
        await pool.sleep()
        await pool.wake()
        learner = changed()
        sync = learner.sync()
        assert await sync.push(learner, [one, other]) == 3  # type: ignore[arg-type]
        await sync.verify([one, other])
        assert (len(dead.received), len(dead.salts)) == (n_calls, n_turns)
        assert pool.policy_version == 3
        with pytest.raises(EngineLostError, match=rf"^{one.name} is dead; restart it, then"):
            await one.generate(PROMPT, SAMPLING, session="v")


async def test_the_run_stops_when_every_engine_is_dead() -> None:
    servers = loopback(), loopback()
    async with reached(servers[0]) as one, reached(servers[1]) as other:
        pool = EnginePool([one, other])
        for server in servers:
            server.breaks, server.is_healthy = "completions", False
        with pytest.raises(EngineLostError, match=r"^vLLM at http\S+ is dead: .*no turns today"):
            await pool.generate(PROMPT, SAMPLING, session="s")
        with pytest.raises(
            EngineLostError, match=rf"^every engine is dead \({one.name}, {other.name}\); restart"
        ):
            await pool.generate(PROMPT, SAMPLING, session="t")
        with pytest.raises(ModelError, match="every engine is dead"):
            await changed().push(one, other)


async def test_a_turn_that_healthy_engines_fail_at_fails_its_episode() -> None:
    dead, busy = loopback(), loopback()
    async with reached(dead) as one, reached(busy) as other:
        dead.breaks, dead.is_healthy = "completions", False
        busy.breaks = "completions"
        with pytest.raises(EngineError, match="no turns today"):
            await EnginePool([one, other]).generate(PROMPT, SAMPLING, session="s")


@pytest.mark.parametrize("at", ["pause", "collective_rpc", "resume"])
async def test_weights_are_pushed_to_the_others_if_an_engine_dies_during_the_push(
    at: str, caplog: pytest.LogCaptureFixture
) -> None:
    dead, alive = loopback(), loopback()
    async with reached(dead) as one, reached(alive) as other:
        learner = changed()
        sync = learner.sync()
        dead.breaks, dead.is_healthy = at, False
        with caplog.at_level(logging.WARNING):
            await sync.push(learner, [one, other])  # type: ignore[arg-type]
        assert f"the run continues without a dead engine: {one.name} failed to" in caplog.text
        assert one.is_dead
        assert not other.is_dead
        assert other.policy_version == 3
        await sync.verify([one, other])


async def test_an_engine_that_dies_before_verification_is_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dead = loopback()
    async with reached(dead) as one, reached(loopback()) as other:
        learner = changed()
        sync = learner.sync()
        await sync.push(learner, [one, other])  # type: ignore[arg-type]
        dead.breaks, dead.is_healthy = "collective_rpc", False
        await sync.verify([one, other])
    assert "the run continues without a dead engine" in caplog.text


async def test_a_healthy_engine_that_fails_stops_the_run_although_another_died() -> None:
    dead, odd = loopback(), loopback()
    async with reached(dead) as one, reached(odd) as other:
        dead.breaks, dead.is_healthy = "reset_prefix_cache", False
        odd.breaks = "reset_prefix_cache"
        with pytest.raises(ModelError, match=rf"^{other.name} failed to drop its cache"):
            await broadcast([one, other], VllmServer.sleep)


async def test_a_restarted_engine_is_not_trusted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two turns fail: the first detects that it is dead, the second gets a response after a restart."""
    server = loopback()
    async with reached(server) as engine:
        generate = OpenAIEngine.generate

        async def meanwhile(self: OpenAIEngine, *args: Any, **kwargs: Any) -> Completion:
            completion = await generate(self, *args, **kwargs)
            engine.is_dead = True
            return completion

        monkeypatch.setattr(OpenAIEngine, "generate", meanwhile)
        with pytest.raises(EngineLostError, match="is dead; restart it"):
            await engine.generate(PROMPT, SAMPLING, session="s")
        server.breaks = (
            "reset_prefix_cache"  # it responds, but the failure counts as the dead engine's
        )
        with pytest.raises(EngineLostError):
            await engine.sleep()
        assert engine.is_dead


async def test_requests_do_not_wait_for_an_engine_that_died_asleep() -> None:
    server = loopback(sleep_mode=True)
    async with reached(server) as engine:
        server.breaks, server.is_healthy = "sleep", False
        with pytest.raises(EngineLostError):
            await engine.sleep()
        with pytest.raises(EngineLostError):
            await engine.generate(PROMPT, SAMPLING, session="s")
