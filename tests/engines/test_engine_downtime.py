"""Which time an episode loses to its engine, and when a time limit therefore gives no grade."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from threading import Thread

import pytest
from tests.engines.broken_server_runs import CONTEXT, SAMPLING, open_env
from tests.engines.broken_servers import answer_well, responding, sending
from tests.fakes.broken_http import (
    BROKEN,
    MODEL,
    Behaviour,
    Connection,
    HttpRequest,
    broken_http,
    good_answer,
)
from tests.fakes.chars import CharRenderer
from tests.fakes.counter_env import TASK, CounterEnv, make_factory
from tests.fakes.scripted_engine import ScriptedEngine, token_agent

from skyfleet.chat.message import Message
from skyfleet.chat.transcript import Completion
from skyfleet.engines.engine import Engine
from skyfleet.engines.engine_downtime import AnswerTimes
from skyfleet.engines.engine_pool import EnginePool
from skyfleet.engines.openai_chat import OpenAIChat
from skyfleet.engines.openai_engine import OpenAIEngine
from skyfleet.engines.post_request import PostRequest
from skyfleet.engines.response_body import completion_bytes
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.env import Env, Observation
from skyfleet.errors import EngineError
from skyfleet.rollouts.conversation import AgentFactory, TokenConversation
from skyfleet.rollouts.episode import Limits, collect, run_episode
from skyfleet.tasks.task import Task
from skyfleet.trajectories.episode_clock import EpisodeClock
from skyfleet.trajectories.trajectory import Ending, Trajectory

HASTY = Limits(max_turns=500, max_input_length=CONTEXT, trajectory_timeout_seconds=1.0)
FAIL = responding(b"overloaded", 500)
HANG = sending(then="hang")


def agent(engine: Engine) -> AgentFactory:
    def start(task: Task, observation: Observation, session: str) -> TokenConversation:
        return TokenConversation(
            observation,
            engine=engine,
            renderer=CharRenderer(),
            sampling=SAMPLING,
            session=session,
        )

    return start


@asynccontextmanager
async def connected(behave: Behaviour, *, max_concurrent: int = 64) -> AsyncIterator[OpenAIEngine]:
    async with (
        broken_http(behave) as url,
        OpenAIEngine(f"{url}/v1", model=MODEL, max_concurrent=max_concurrent) as engine,
    ):
        yield engine


async def play(
    engine: Engine, *, attempts: int = 1, limits: Limits = HASTY
) -> Sequence[Trajectory]:
    task = Task(key=BROKEN, env_key="counter", prompt="count to 3")
    (group,) = await collect(
        [task], open_env, agent(engine), limits, n_samples=attempts, max_concurrent=64
    )
    return group.trajectories


def test_a_request_is_unanswered_after_three_times_the_longest_answered_one() -> None:
    times = AnswerTimes()
    assert times.patience_seconds(64) == 0.2  # nothing was ever answered
    times.record(64, 0.01)
    assert times.patience_seconds(64) == 0.2
    times.record(64, 2.0)
    times.record(64, 0.5)
    assert times.patience_seconds(64) == 6.0
    # Twice the tokens may take twice as long; fewer tokens may still wait in the same queue.
    assert times.patience_seconds(128) == 12.0
    assert times.patience_seconds(1) == 6.0


def test_the_patience_for_more_tokens_than_were_ever_answered_is_bounded() -> None:
    times = AnswerTimes()
    times.record(1, 0.5)
    assert times.patience_seconds(1024) == 3 * 0.5 * 32
    assert times.patience_seconds(1024, 10.0) == 10.0
    # What was measured is proof, whatever the limit of an episode is.
    times.record(1024, 20.0)
    assert times.patience_seconds(1024, 10.0) == 60.0


async def test_slow_but_healthy_generation_is_graded_when_its_time_is_over() -> None:
    async def press_for_ever(request: HttpRequest, connection: Connection) -> bool:
        await asyncio.sleep(0.1)
        return await answer_first_turn(request, connection)

    async with connected(press_for_ever) as engine:
        (attempt,) = await play(engine)
    assert (attempt.ending, attempt.reward) == (Ending.TIMEOUT, 0.0)
    assert len(attempt.turns) > 1


async def answer_first_turn(request: HttpRequest, connection: Connection) -> bool:
    """Press again, whatever was pressed before: the episode has no end."""
    first = HttpRequest(path=request.path, body={"prompt": []}, number=0)
    answer = good_answer(first)
    answer["choices"][0]["prompt_token_ids"] = request.body["prompt"]
    await connection.respond(json.dumps(answer).encode())
    return True


async def test_a_server_that_hangs_shortly_before_the_limit_is_found_out() -> None:
    """Answers take 0.25 s, so the one in flight at 1 s may be slow; it never comes."""

    async def hang_later(request: HttpRequest, connection: Connection) -> bool | None:
        await asyncio.sleep(0.25)
        answer = answer_first_turn if request.number < 3 else HANG
        return await answer(request, connection)

    async with connected(hang_later) as engine:
        (attempt,) = await play(engine)
    assert (attempt.ending, attempt.reward) == (Ending.FAILED, None)


async def test_an_answer_that_comes_after_the_limit_is_not_used() -> None:
    async def answer_later(request: HttpRequest, connection: Connection) -> bool:
        await asyncio.sleep(0.9)
        return await answer_well(request, connection)

    async with connected(answer_later) as engine:
        (attempt,) = await play(engine, limits=replace(HASTY, trajectory_timeout_seconds=1.6))
    assert (len(attempt.turns), attempt.ending) == (1, Ending.TIMEOUT)
    assert attempt.reward == 1.0  # of the state that one press by three left


async def test_an_engine_in_this_process_is_healthy_unless_it_raises() -> None:
    engine = ScriptedEngine("done", delay=60)
    attempt = await run_episode(TASK, make_factory(CounterEnv()), token_agent(engine), HASTY)
    assert (attempt.ending, attempt.reward) == (Ending.TIMEOUT, 0.0)


LARGE = 100_000


@pytest.mark.parametrize(
    ("is_busy", "pause_seconds", "is_dead"),
    [(False, 0.0, False), (True, 0.0, False), (False, 0.05, False), (False, 0.2, True)],
    ids=["healthy", "busy loop", "slow link", "drips"],
)
async def test_a_body_is_lost_if_its_server_is_slow_and_not_if_this_process_is(
    is_busy: bool, pause_seconds: float, is_dead: bool
) -> None:
    reply = {"role": "assistant", "content": "x" * LARGE}
    body = json.dumps({"choices": [{"finish_reason": "stop", "message": reply}]}).encode()

    def serve(listening: socket.socket) -> None:
        # In a thread of its own: it does not wait for the loop that is blocked.
        connection, _ = listening.accept()
        with connection:
            while b"max_tokens" not in connection.recv(1 << 16):
                pass
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body))
            for start in range(0, len(body), LARGE // 8):
                connection.sendall(body[start : start + LARGE // 8])
                time.sleep(pause_seconds)

    async def block() -> None:
        while is_busy:
            time.sleep(0.15)  # noqa: ASYNC251 - an environment that blocks the event loop
            await asyncio.sleep(0)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        Thread(target=serve, args=(listening,), daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        async with OpenAIChat(url, model=MODEL) as model, EpisodeClock(100) as clock:
            blocker = asyncio.create_task(block())
            await model.reply([Message(role="user", content="q")], (), SAMPLING)
            blocker.cancel()
    assert (clock.engine_downtime_seconds > 0) is is_dead


async def test_an_answer_that_waits_for_a_blocked_event_loop_is_no_unanswered_request() -> None:
    request = PostRequest({"max_tokens": 64}, {})
    with request.lateness:
        request.begin_attempt()
        await asyncio.sleep(0.01)
        time.sleep(0.5)  # noqa: ASYNC251
        assert request.seconds_until_unanswered(AnswerTimes()) > 0
        await asyncio.sleep(0.25)
        assert request.seconds_until_unanswered(AnswerTimes()) == 0
    assert request.measure_loss(AnswerTimes()) >= 0.2


async def test_an_environment_that_hangs_after_a_retried_request_has_no_grade() -> None:
    async def recover(request: HttpRequest, connection: Connection) -> bool | None:
        return await (answer_well if request.number else FAIL)(request, connection)

    class Hanging(CounterEnv):
        async def reset(self) -> Observation:
            return await (await open_env(task)).reset()

    task = Task(key=BROKEN, env_key="counter", prompt="count to 3")
    env: Env = Hanging(breaks="step", hangs=True)
    async with connected(recover) as engine:
        attempt = await run_episode(task, make_factory(env), agent(engine), HASTY)
    assert (attempt.ending, attempt.reward) == (Ending.FAILED, None)
    assert attempt.failure is not None
    assert "not finished after 1 s" in attempt.failure.detail
    assert "failed with 500: overloaded); check the server" in attempt.failure.detail


async def test_who_waits_for_a_connection_that_hangs_has_no_grade() -> None:
    async with connected(HANG, max_concurrent=1) as engine:
        attempts = await play(engine, attempts=3)
    assert [attempt.reward for attempt in attempts] == [None] * 3


async def test_who_waits_for_a_connection_that_is_busy_is_graded() -> None:
    async def take_turns(request: HttpRequest, connection: Connection) -> bool:
        await asyncio.sleep(0.15)
        return await answer_first_turn(request, connection)

    async with connected(take_turns, max_concurrent=1) as engine:
        attempts = await play(engine, attempts=2)
    assert {attempt.ending for attempt in attempts} == {Ending.TIMEOUT}
    assert None not in [attempt.reward for attempt in attempts]


class FailingSlowly(ScriptedEngine):
    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
    ) -> Completion:
        await asyncio.sleep(0.3)
        raise EngineError("the engine broke")


async def test_time_that_a_failed_engine_of_a_pool_took_is_lost() -> None:
    slow = ScriptedEngine("done", delay=60)
    pool = EnginePool([FailingSlowly(), slow])
    attempt = await run_episode(TASK, make_factory(CounterEnv()), token_agent(pool), HASTY)
    assert attempt.reward is None
    assert attempt.failure is not None
    assert "of which 0.3 s were lost" in attempt.failure.detail
    assert "(the engine broke)" in attempt.failure.detail


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("2", 2.0),
        ("3600", 60.0),
        ("9" * 400, 60.0),
        ("-5", 0.0),
        ("soon", 0.0),
        ("", 0.0),
        ("Thu, 01 Jan 2999 00:00:00 GMT", 60.0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
    ],
)
async def test_retry_after_is_honoured_up_to_a_minute(
    value: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    behave = responding(b"", 503, {"Retry-After": value})
    async with connected(behave) as engine:
        with monkeypatch.context() as patched:
            patched.setattr(asyncio, "sleep", sleep)
            with pytest.raises(EngineError, match="failed 8 times"):
                await engine.generate([*map(ord, BROKEN)], SAMPLING, session="s")
    assert len(slept) == 7
    assert all(max(0.25, seconds) <= pause <= max(15.0, seconds) for pause in slept)
    assert len(set(slept)) > 1 or seconds == 60.0


def test_the_size_limit_of_a_response_grows_with_its_tokens() -> None:
    assert completion_bytes(0, 0) == 1 << 20
    assert completion_bytes(1024, 0) == 2 << 20
    assert completion_bytes(0, 1 << 16) == 2 << 20


async def test_a_session_that_no_header_can_carry_is_quoted() -> None:
    async with connected(answer_well) as engine:
        prompt = [*map(ord, BROKEN)]
        for session in ("tâche/0", "a\r\nX-Injected: 1/0"):
            assert (await engine.generate(prompt, SAMPLING, session=session)).token_ids
