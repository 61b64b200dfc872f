"""The engine pool: sticky sessions, failover, pauses for new weights, and aborted turns."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest
from tests.fakes.counter_env import PRESS, TASK, CounterEnv, make_factory
from tests.fakes.scripted_engine import ScriptedEngine, token_agent

from skyfleet.chat.message import Message, ToolSpec
from skyfleet.chat.transcript import Completion, Finish
from skyfleet.engines import engine_pool
from skyfleet.engines.chat_engine import ChatCompletion
from skyfleet.engines.engine_pool import ChatEnginePool, EnginePool
from skyfleet.engines.http_client import RequestRejectedError
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.errors import ConfigError, EngineError
from skyfleet.rollouts.episode import Limits, run_episode
from skyfleet.trajectories.trajectory import Ending

SAMPLING = SamplingParams(max_generate_length=10)


class Recorded:
    """Returns token 1 or raises `error`, waits for `gate`, and records requests."""

    def __init__(self, error: Exception | None = None, *, finishes: Sequence[Finish] = ()) -> None:
        self.policy_version = 0
        self.error, self.gate = error, asyncio.Event()
        self.gate.set()
        self.requests: list[tuple[str, tuple[int, ...], int]] = []
        self.released: list[str] = []
        self._finishes = list(finishes)

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
    ) -> Completion:
        version = self.policy_version
        self.requests.append((session, tuple(token_ids), sampling.max_generate_length))
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        finish = self._finishes.pop(0) if self._finishes else "stop"
        return Completion(token_ids=(1,), logprobs=(-1.0,), finish=finish, policy_version=version)

    async def release(self, session: str) -> None:
        self.released.append(session)

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    @property
    def sessions(self) -> list[str]:
        return [session for session, _, _ in self.requests]


async def generate(pool: EnginePool, session: str) -> Completion:
    return await pool.generate([5], SAMPLING, session=session)


async def test_sessions_are_sticky_and_new_ones_go_to_the_least_loaded_engine() -> None:
    engines = [Recorded(), Recorded()]
    pool = EnginePool(engines)
    for session in ("a", "b", "c", "a", "b", "c"):
        await generate(pool, session)
    assert [engine.sessions for engine in engines] == [["a", "c", "a", "c"], ["b", "b"]]
    await pool.release("c")
    await pool.release("a")
    assert engines[0].released == ["c", "a"]
    for session in ("d", "e", "f"):
        await generate(pool, session)
    assert [engine.sessions[-2:] for engine in engines] == [["d", "e"], ["b", "f"]]


async def test_sessions_of_a_failed_engine_continue_on_another_from_their_tokens(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dying, other = Recorded(), Recorded()
    pool = EnginePool([dying, other])
    await generate(pool, "a")
    dying.error = RuntimeError("the device is gone")
    with caplog.at_level(logging.WARNING):
        completion = await pool.generate([5, 1, 6], SAMPLING, session="a")
    assert completion.token_ids == (1,)
    assert other.requests == [("a", (5, 1, 6), 10)]
    assert "engine 0 failed, session a continues on engine 1: the device is gone" in caplog.text
    await generate(pool, "b")
    await generate(pool, "a")
    assert other.sessions == ["a", "b", "a"]  # the failed engine cools down
    assert dying.sessions == ["a", "a"]


async def test_a_failed_engine_is_logged_once_and_not_per_session(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dying, other = Recorded(), Recorded()
    pool = EnginePool([dying, other])
    sessions = [f"s{n}" for n in range(6)]
    for session in sessions:
        await generate(pool, session)
    dying.error = RuntimeError("the device is gone")
    with caplog.at_level(logging.WARNING):
        await asyncio.gather(*(generate(pool, session) for session in sessions))
    assert len(caplog.records) == 1


async def test_an_engine_is_used_again_after_its_cooldown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_pool, "COOLDOWN_SECONDS", 0.0)
    dying, other = Recorded(RuntimeError("busy")), Recorded()
    pool = EnginePool([dying, other])
    await generate(pool, "a")
    dying.error = None
    await generate(pool, "b")
    assert dying.sessions == ["a", "b"]


async def test_an_error_of_every_engine_is_raised_without_a_cooldown() -> None:
    engines = [Recorded(EngineError("too long")), Recorded(EngineError("too long"))]
    pool = EnginePool(engines)
    with pytest.raises(EngineError, match="too long"):
        await generate(pool, "a")
    for engine in engines:
        engine.error = None
    await generate(pool, "b")
    assert engines[0].sessions == ["a", "b"]  # no engine cools down


async def test_a_rejected_request_is_not_tried_on_another_engine() -> None:
    engines = [Recorded(RequestRejectedError("no")), Recorded()]
    with pytest.raises(RequestRejectedError):
        await generate(EnginePool(engines), "a")
    assert engines[1].requests == []


async def test_an_episode_survives_the_failure_of_its_engine() -> None:
    lines = (PRESS % 1, PRESS % 2, "done")
    first = ScriptedEngine(lines[0], RuntimeError("died"))
    second = ScriptedEngine(*lines[1:])
    limits = Limits(max_turns=5, max_input_length=500, trajectory_timeout_seconds=5)
    env = CounterEnv()
    policy = token_agent(EnginePool([first, second]))
    trajectory = await run_episode(TASK, make_factory(env), policy, limits)
    assert trajectory.ending is Ending.DONE
    assert trajectory.grade is not None
    assert trajectory.grade.success
    assert len(trajectory.transcripts) == 1
    assert second.released == ["t/0"]


async def test_an_aborted_turn_continues_from_its_tokens_with_its_oldest_version() -> None:
    engine = Recorded(finishes=["abort", "abort", "stop"])
    engine.policy_version = 3
    pool = EnginePool([engine])
    completion = await generate(pool, "a")
    assert engine.requests == [("a", (5,), 10), ("a", (5, 1), 9), ("a", (5, 1, 1), 8)]
    assert (completion.token_ids, completion.finish, completion.policy_version) == (
        (1, 1, 1),
        "stop",
        3,
    )


async def test_a_turn_aborted_at_its_last_token_ends_by_length() -> None:
    engine = Recorded(finishes=["abort"])
    one = SamplingParams(max_generate_length=1)
    completion = await EnginePool([engine]).generate([5], one, session="a")
    assert (completion.token_ids, completion.finish) == ((1,), "length")


async def test_a_waiting_pause_lets_turns_end_and_starts_none() -> None:
    engine = Recorded()
    pool = EnginePool([engine])
    engine.gate.clear()
    running = asyncio.create_task(generate(pool, "a"))
    await asyncio.sleep(0)
    begun = asyncio.Event()

    async def update() -> None:
        async with pool.paused(wait=True):
            begun.set()
            late = asyncio.create_task(generate(pool, "b"))
            await asyncio.sleep(0.01)
            assert engine.sessions == ["a"]
            pool.policy_version = 1
        assert (await late).policy_version == 1

    updating = asyncio.create_task(update())
    await asyncio.sleep(0.01)
    assert not begun.is_set()
    engine.gate.set()
    await updating
    assert (await running).policy_version == 0


async def test_a_pause_without_waiting_lets_running_turns_continue() -> None:
    engine = Recorded()
    pool = EnginePool([engine])
    engine.gate.clear()
    running = asyncio.create_task(generate(pool, "a"))
    await asyncio.sleep(0)
    async with pool.paused(wait=False):
        assert not running.done()
        pool.policy_version = 1
    engine.gate.set()
    assert (await running).policy_version == 0  # the oldest version counts
    assert (await generate(pool, "a")).policy_version == 1


async def test_nested_pauses_end_together() -> None:
    pool = EnginePool([Recorded()])
    async with pool.paused(wait=True):
        async with pool.paused(wait=True):
            pass
        turn = asyncio.create_task(generate(pool, "a"))
        await asyncio.sleep(0.01)
        assert not turn.done()
    await turn


def test_the_pool_version_is_the_oldest_and_setting_it_sets_all() -> None:
    engines = [Recorded(), Recorded()]
    engines[0].policy_version = 4
    pool = EnginePool(engines)
    assert pool.policy_version == 0
    pool.policy_version = 5
    assert [engine.policy_version for engine in engines] == [5, 5]


def test_a_pool_without_engines_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"engines=\[\]; a pool needs at least one engine"):
        EnginePool([])


class Chatting(Recorded):
    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        sampling: SamplingParams,
        *,
        session: str,
    ) -> ChatCompletion:
        completion = await self.generate([len(messages)], sampling, session=session)
        message = Message(role="assistant", content="1")
        return ChatCompletion(message=message, prompt_token_ids=(5,), completion=completion)


async def test_chat_sessions_are_sticky_and_move_on_failure() -> None:
    engines = [Chatting(), Chatting()]
    pool = ChatEnginePool(engines)
    talk = [Message(role="user", content="hi")]
    for session in ("a", "b", "a"):
        await pool.chat(talk, (), SAMPLING, session=session)
    assert [engine.sessions for engine in engines] == [["a", "a"], ["b"]]
    engines[0].error = RuntimeError("the device is gone")
    completion = await pool.chat(talk, (), SAMPLING, session="a")
    assert completion.completion.token_ids == (1,)
    await pool.release("a")
    assert engines[1].released == ["a"]
