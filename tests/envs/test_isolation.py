"""Where environments run: the event loop, a thread, a worker process; and how calls are guarded."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from tests.fakes.counter_env import PRESS, TASK, CounterEnv
from tests.fakes.scripted_engine import ScriptedEngine, token_agent

from skyfleet.chat.message import Message
from skyfleet.envs.env import Env, EnvFactory, Observation, Step
from skyfleet.envs.guard import EnvGuard, Isolation, Mode
from skyfleet.envs.guarded_call import MAX_ABANDONED, AbandonedCalls, raised_by_code
from skyfleet.envs.python_env import as_env_factory
from skyfleet.envs.stalls import EnvInterrupt
from skyfleet.envs.thread_env import LoopThread
from skyfleet.envs.worker_env import kill_idle_workers
from skyfleet.errors import EnvError
from skyfleet.rollouts.episode import Limits, collect, run_episode
from skyfleet.tasks.task import Task
from skyfleet.trajectories.trajectory import Ending, Trajectory

LIMITS = Limits(max_turns=4, max_input_length=1000, trajectory_timeout_seconds=20)
LINES = (PRESS % 3, "done")


class Reporting(CounterEnv):
    """Says in its first reply where it runs."""

    async def step(self, action: Message) -> Step:
        step = await super().step(action)
        where = f"{os.getpid()} {threading.get_ident()}"
        return replace(step, messages=(Message(role="tool", content=where),), info={"n": 1.0})


class Blocking(Reporting):
    async def reset(self) -> Observation:
        time.sleep(0.4)  # noqa: ASYNC251
        return await super().reset()


async def open_reporting(task: Task) -> Env:
    return Reporting()


async def played(open_env: EnvFactory, mode: Mode, **limits: Any) -> Trajectory:
    engine = token_agent(ScriptedEngine(*LINES))
    isolation = Isolation(mode=mode, worker_memory_gb=2)
    changed = replace(LIMITS, isolation=isolation, **limits)
    return await run_episode(TASK, open_env, engine, changed)


def place(trajectory: Trajectory) -> str:
    pid, thread = trajectory.turns[0].replies[0].text.split()
    if int(pid) != os.getpid():
        return "process"
    return "loop" if int(thread) == threading.get_ident() else "thread"


async def test_an_episode_is_the_same_wherever_its_environment_runs() -> None:
    held = {"offset": 0}

    async def closure(task: Task) -> Env:
        env = Reporting()
        env.count = held["offset"]
        return env

    by_name = as_env_factory(open_reporting, spec=f"{__name__}:open_reporting")
    modes: tuple[tuple[EnvFactory, Mode, str], ...] = (
        (by_name, "none", "loop"),
        (by_name, "auto", "loop"),
        (by_name, "thread", "thread"),
        (by_name, "process", "process"),
        (as_env_factory(closure), "process", "process"),
    )
    for factory, mode, expected in modes:
        trajectory = await played(factory, mode)
        assert (place(trajectory), trajectory.ending) == (expected, Ending.DONE)
        assert (trajectory.reward, trajectory.turns[0].info) == (1.0, {"n": 1.0})
    again = [(await played(by_name, "process")).turns[0].replies[0].text for _ in range(2)]
    assert again[0].split()[0] == again[1].split()[0], "a worker serves one episode after another"
    kill_idle_workers()


async def test_later_episodes_of_an_environment_that_blocks_start_in_a_thread(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyfleet.envs.stalls._warned", set())
    factory = as_env_factory(Blocking)
    places = [place(await played(factory, "auto")) for _ in range(3)]
    assert places == ["loop", "loop", "thread"]
    assert "environment counter held the event loop for 0.4 s in reset at test_isolation" in (
        caplog.text
    )
    assert [place(await played(as_env_factory(Blocking), "none")) for _ in range(3)] == ["loop"] * 3


async def test_what_cannot_be_pickled_stays_in_a_thread_and_the_run_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lock = threading.Lock()

    async def open_env(task: Task) -> Env:
        with lock:
            return Reporting()

    factory = as_env_factory(open_env)
    assert [place(await played(factory, "process")) for _ in range(2)] == ["thread"] * 2
    assert caplog.text.count("runs in threads, not in processes: it cannot be pickled") == 1


async def test_an_environment_bound_to_the_event_loop_goes_back_there() -> None:
    home = asyncio.get_running_loop()

    class Bound(Blocking):
        async def step(self, action: Message) -> Step:
            if asyncio.get_running_loop() is not home:
                raise RuntimeError("is bound to a different event loop")
            return await super().step(action)

    factory = as_env_factory(Bound)
    endings = [(await played(factory, "auto")).ending for _ in range(4)]
    assert endings == [Ending.DONE, Ending.DONE, Ending.FAILED, Ending.DONE]


async def test_time_limits_and_task_groups_inside_an_environment_work_as_ever() -> None:
    class Patient(CounterEnv):
        async def step(self, action: Message) -> Step:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await asyncio.gather(asyncio.sleep(9), asyncio.sleep(9))
            with pytest.raises(ExceptionGroup):
                await self._fail_in_a_group()
            waiting = asyncio.create_task(asyncio.sleep(9))
            waiting.cancel()
            await asyncio.wait({waiting})
            return await super().step(action)

        async def _fail_in_a_group(self) -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._fail())
                await asyncio.sleep(9)

        async def _fail(self) -> None:
            raise OSError

    for mode in ("none", "thread"):
        trajectory = await played(as_env_factory(Patient), mode)
        assert (trajectory.ending, trajectory.reward) == (Ending.DONE, 1.0)


async def test_cancelling_the_run_ends_a_call_at_once_and_one_that_resists_after_its_grace() -> (
    None
):
    class Resisting(CounterEnv):
        async def step(self, action: Message) -> Step:
            while True:
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    continue

    async def open_env(task: Task) -> Env:
        return Resisting()

    limits = replace(LIMITS, close_timeout_seconds=0.05)
    policy = token_agent(ScriptedEngine(*LINES))
    running = asyncio.create_task(
        collect([TASK], open_env, policy, limits, n_samples=2, max_concurrent=2)
    )
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(running, 5)


async def test_an_environment_with_too_many_abandoned_calls_is_not_opened_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = AbandonedCalls()
    monkeypatch.setattr("skyfleet.envs.env.abandoned_calls", calls)
    factory = as_env_factory(CounterEnv)
    key = ("counter", id(factory))
    for _ in range(MAX_ABANDONED):
        calls.add(key, lambda: True)
    calls.add(key, lambda: False)
    failure = (await played(factory, "auto")).failure
    assert failure is not None
    assert "32 of its calls were abandoned and still run" in failure.detail
    other = await played(as_env_factory(CounterEnv), "auto")
    assert other.reward == 1.0, "another environment of the same name is opened"


def test_the_users_ctrl_c_is_not_mistaken_for_the_environments_own() -> None:
    def interrupted(act: Any) -> bool:
        try:
            act()
        except KeyboardInterrupt as error:
            return raised_by_code(error)
        raise AssertionError

    def raises() -> None:
        raise KeyboardInterrupt

    def is_interrupted() -> None:
        signal.raise_signal(signal.SIGINT)
        time.sleep(1)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert (interrupted(raises), interrupted(is_interrupted)) == (True, False)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_loop_outside_the_main_thread_is_interrupted_too() -> None:
    class Spinning(CounterEnv):
        async def step(self, action: Message) -> Step:
            while True:
                pass

    found: list[Trajectory] = []

    def run() -> None:
        limit = {"trajectory_timeout_seconds": 0.3}
        found.append(asyncio.run(played(as_env_factory(Spinning), "auto", **limit)))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert found[0].failure is not None
    assert "held its thread beyond the limit of 0.3 s" in found[0].failure.detail


async def test_an_interrupt_is_the_cause_also_if_the_limit_ends_the_episode_in_the_same_instant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def hold() -> None:
        raise EnvInterrupt

    def wrap(future: Any) -> asyncio.Future[Any]:
        waiting = wrap_future(future)
        waiting.add_done_callback(lambda _: task.cancel())
        return waiting

    wrap_future = asyncio.wrap_future
    monkeypatch.setattr(asyncio, "wrap_future", wrap)
    thread = LoopThread(EnvGuard("counter", "t", is_isolated=True))
    task = asyncio.create_task(thread.call(EnvError, "step", hold))
    with pytest.raises(EnvError, match=r"held its thread"):
        await task
    thread.end()


async def test_a_guard_names_the_call_and_keeps_episode_errors() -> None:
    async def fail(error: BaseException) -> None:
        raise error

    guard = EnvGuard("counter", "t")
    with pytest.raises(EnvError, match=r"^step: SystemExit: 3$"):
        await guard.call(EnvError, "step", fail, SystemExit(3))
    with pytest.raises(EnvError, match=r"^mine$"):
        await guard.call(EnvError, "step", fail, EnvError("mine"))
    with pytest.raises(EnvError, match=r"held its thread"):
        await guard.call(EnvError, "step", fail, EnvInterrupt())
