"""Several engines as one: sessions stay, move when an engine dies, and wait for new weights."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest
from tests.fakes.counter_env import PRESS, TASK, CounterEnv, opening
from tests.fakes.scripted_engine import ScriptedEngine, speaking

from skyfleet.chat.message import Message, ToolSpec
from skyfleet.chat.transcript import Completion, Finish
from skyfleet.engines import engine_pool as seats
from skyfleet.engines.chat_engine import ChatCompletion
from skyfleet.engines.engine_pool import ChatRouter, Router
from skyfleet.engines.http_client import RefusedError
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.errors import ConfigError, EngineError
from skyfleet.rollouts.episode import Limits, run_episode
from skyfleet.trajectories.trajectory import Ending

SAMPLING = SamplingParams(max_generate_length=10)


class Recorded:
    """Says 1, or raises `error`; waits for `gate`; keeps what it was asked."""

    def __init__(self, error: Exception | None = None, *, finishes: Sequence[Finish] = ()) -> None:
        self.policy_version = 0
        self.error, self.gate = error, asyncio.Event()
        self.gate.set()
        self.asked: list[tuple[str, tuple[int, ...], int]] = []
        self.released: list[str] = []
        self._finishes = list(finishes)

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
    ) -> Completion:
        version = self.policy_version
        self.asked.append((session, tuple(token_ids), sampling.max_generate_length))
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
        return [session for session, _, _ in self.asked]


async def say(router: Router, session: str) -> Completion:
    return await router.generate([5], SAMPLING, session=session)


async def test_a_session_stays_and_the_next_goes_where_fewest_are() -> None:
    engines = [Recorded(), Recorded()]
    router = Router(engines)
    for session in ("a", "b", "c", "a", "b", "c"):
        await say(router, session)
    assert [engine.sessions for engine in engines] == [["a", "c", "a", "c"], ["b", "b"]]
    await router.release("c")
    await router.release("a")
    assert engines[0].released == ["c", "a"]
    for session in ("d", "e", "f"):
        await say(router, session)
    assert [engine.sessions[-2:] for engine in engines] == [["d", "e"], ["b", "f"]]


async def test_the_sessions_of_an_engine_that_dies_go_on_elsewhere_from_their_tokens(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dying, other = Recorded(), Recorded()
    router = Router([dying, other])
    await say(router, "a")
    dying.error = RuntimeError("the device is gone")
    with caplog.at_level(logging.WARNING):
        said = await router.generate([5, 1, 6], SAMPLING, session="a")
    assert said.token_ids == (1,)
    assert other.asked == [("a", (5, 1, 6), 10)]
    assert "engine 0 failed and session a went on at engine 1: the device is gone" in caplog.text
    await say(router, "b")
    await say(router, "a")
    assert other.sessions == ["a", "b", "a"]  # who failed rests
    assert dying.sessions == ["a", "a"]


async def test_an_engine_that_dies_is_told_once_and_not_for_each_of_its_sessions(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dying, other = Recorded(), Recorded()
    router = Router([dying, other])
    sessions = [f"s{n}" for n in range(6)]
    for session in sessions:
        await say(router, session)
    dying.error = RuntimeError("the device is gone")
    with caplog.at_level(logging.WARNING):
        await asyncio.gather(*(say(router, session) for session in sessions))
    assert len(caplog.records) == 1


async def test_an_engine_that_rested_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seats, "REST_SECONDS", 0.0)
    dying, other = Recorded(RuntimeError("busy")), Recorded()
    router = Router([dying, other])
    await say(router, "a")
    dying.error = None
    await say(router, "b")
    assert dying.sessions == ["a", "b"]


async def test_an_error_that_every_engine_gives_is_the_requests_own() -> None:
    engines = [Recorded(EngineError("too long")), Recorded(EngineError("too long"))]
    router = Router(engines)
    with pytest.raises(EngineError, match="too long"):
        await say(router, "a")
    for engine in engines:
        engine.error = None
    await say(router, "b")
    assert engines[0].sessions == ["a", "b"]  # nobody rests


async def test_a_refusal_of_one_request_is_not_tried_elsewhere() -> None:
    engines = [Recorded(RefusedError("no")), Recorded()]
    with pytest.raises(RefusedError):
        await say(Router(engines), "a")
    assert engines[1].asked == []


async def test_a_whole_episode_survives_the_death_of_its_engine() -> None:
    lines = (PRESS % 1, PRESS % 2, "done")
    first = ScriptedEngine(lines[0], RuntimeError("died"))
    second = ScriptedEngine(*lines[1:])
    limits = Limits(max_turns=5, max_input_length=500, trajectory_timeout_seconds=5)
    env = CounterEnv()
    policy = speaking(Router([first, second]))
    trajectory = await run_episode(TASK, opening(env), policy, limits)
    assert trajectory.ending is Ending.DONE
    assert trajectory.grade is not None
    assert trajectory.grade.success
    assert len(trajectory.transcripts) == 1
    assert second.released == ["t/0"]


async def test_a_turn_broken_off_goes_on_from_its_tokens_with_its_oldest_version() -> None:
    engine = Recorded(finishes=["abort", "abort", "stop"])
    engine.policy_version = 3
    router = Router([engine])
    said = await say(router, "a")
    assert engine.asked == [("a", (5,), 10), ("a", (5, 1), 9), ("a", (5, 1, 1), 8)]
    assert (said.token_ids, said.finish, said.policy_version) == ((1, 1, 1), "stop", 3)


async def test_a_turn_broken_off_at_its_last_token_is_full() -> None:
    engine = Recorded(finishes=["abort"])
    one = SamplingParams(max_generate_length=1)
    said = await Router([engine]).generate([5], one, session="a")
    assert (said.token_ids, said.finish) == ((1,), "length")


async def test_a_pause_that_waits_lets_turns_end_and_none_begin() -> None:
    engine = Recorded()
    router = Router([engine])
    engine.gate.clear()
    running = asyncio.create_task(say(router, "a"))
    await asyncio.sleep(0)
    begun = asyncio.Event()

    async def update() -> None:
        async with router.paused(wait=True):
            begun.set()
            late = asyncio.create_task(say(router, "b"))
            await asyncio.sleep(0.01)
            assert engine.sessions == ["a"]
            router.policy_version = 1
        assert (await late).policy_version == 1

    updating = asyncio.create_task(update())
    await asyncio.sleep(0.01)
    assert not begun.is_set()
    engine.gate.set()
    await updating
    assert (await running).policy_version == 0


async def test_a_pause_that_does_not_wait_lets_turns_run_on() -> None:
    engine = Recorded()
    router = Router([engine])
    engine.gate.clear()
    running = asyncio.create_task(say(router, "a"))
    await asyncio.sleep(0)
    async with router.paused(wait=False):
        assert not running.done()
        router.policy_version = 1
    engine.gate.set()
    assert (await running).policy_version == 0  # the oldest decides how stale it is
    assert (await say(router, "a")).policy_version == 1


async def test_two_pauses_end_when_both_have() -> None:
    router = Router([Recorded()])
    async with router.paused(wait=True):
        async with router.paused(wait=True):
            pass
        turn = asyncio.create_task(say(router, "a"))
        await asyncio.sleep(0.01)
        assert not turn.done()
    await turn


def test_its_version_is_the_oldest_served_and_setting_it_sets_all() -> None:
    engines = [Recorded(), Recorded()]
    engines[0].policy_version = 4
    router = Router(engines)
    assert router.policy_version == 0
    router.policy_version = 5
    assert [engine.policy_version for engine in engines] == [5, 5]


def test_a_router_without_engines_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engines=\[\]; a router needs at least one"):
        Router([])


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


async def test_chats_stay_move_and_end_as_sessions_of_tokens_do() -> None:
    engines = [Chatting(), Chatting()]
    router = ChatRouter(engines)
    talk = [Message(role="user", content="hi")]
    for session in ("a", "b", "a"):
        await router.chat(talk, (), SAMPLING, session=session)
    assert [engine.sessions for engine in engines] == [["a", "a"], ["b"]]
    engines[0].error = RuntimeError("the device is gone")
    spoken = await router.chat(talk, (), SAMPLING, session="a")
    assert spoken.completion.token_ids == (1,)
    await router.release("a")
    assert engines[1].released == ["a"]
