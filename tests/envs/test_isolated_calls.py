"""Calls of environments in threads and worker processes: cancellation, identity of the task, ends."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import threading
import time
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.envs.test_isolation import LIMITS, LINES, place, played
from tests.fakes.counter_env import TASK, CounterEnv
from tests.fakes.scripted_engine import ScriptedEngine, token_agent

from skyfleet.chat.message import Message
from skyfleet.envs import stalls, watchdog
from skyfleet.envs.env import Env, EnvFactory, Observation, Step
from skyfleet.envs.guard import EnvGuard, Isolation, Mode
from skyfleet.envs.isolation import isolate
from skyfleet.envs.python_env import as_env_factory
from skyfleet.envs.stalls import find_monitor, read_cpu_seconds
from skyfleet.envs.thread_env import open_in_thread
from skyfleet.envs.worker_env import _starter, kill_idle_workers
from skyfleet.envs.worker_process import find_descendants
from skyfleet.rollouts.episode import run_episode
from skyfleet.tasks.task import Task
from skyfleet.trajectories.episode_clock import EpisodeClock
from skyfleet.trajectories.trajectory import Ending, Trajectory

SETTING: ContextVar[str] = ContextVar("SETTING", default="lost")


@pytest.fixture(autouse=True)
def without_idle_workers() -> Iterator[None]:
    yield
    kill_idle_workers()


def say(content: str) -> Observation:
    return Observation(messages=(Message(role="user", content=content),))


class Sleeping(CounterEnv):
    """Says when its step starts, then blocks its thread."""

    started = threading.Event()

    async def step(self, action: Message) -> Step:
        type(self).started.set()
        time.sleep(0.6)  # noqa: ASYNC251
        return await super().step(action)


async def start_sleeping(mode: Mode, **limits: Any) -> asyncio.Task[Trajectory]:
    Sleeping.started.clear()
    running = asyncio.create_task(played(as_env_factory(Sleeping), mode, **limits))
    while not Sleeping.started.is_set():  # noqa: ASYNC110 - a thread sets it
        await asyncio.sleep(0.01)
    return running


async def test_a_call_that_blocks_a_thread_leaves_the_event_loop_of_the_run_alone() -> None:
    running = await start_sleeping("thread", trajectory_timeout_seconds=0.2)
    assert find_monitor().running is None
    for _ in range(3):  # forward passes of an engine in the event loop
        time.sleep(0.3)  # noqa: ASYNC251
        await asyncio.sleep(0)
    assert (await running).failure is not None


async def test_the_runs_cancellation_of_a_call_in_a_thread_is_not_lost() -> None:
    running = await start_sleeping("thread")
    running.cancel()
    time.sleep(0.7)  # noqa: ASYNC251
    with pytest.raises(asyncio.CancelledError):
        await running


class SameTask(CounterEnv):
    """Uses the task and the context of reset in its later calls, and may leave a task behind."""

    async def reset(self) -> Observation:
        self._task = asyncio.current_task()
        SETTING.set("kept")
        return await super().reset()

    async def step(self, action: Message) -> Step:
        assert self._task is asyncio.current_task()
        return replace(
            await super().step(action),
            messages=(Message(role="tool", content=f"{os.getpid()} {SETTING.get()}"),),
        )

    async def close(self) -> None:
        assert self._task is asyncio.current_task()


class LeavingTask(SameTask):
    async def reset(self) -> Observation:
        self.left = asyncio.create_task(self._stay())
        return await super().reset()

    async def _stay(self) -> None:
        await asyncio.sleep(60)


class StubbornTask(LeavingTask):
    async def _stay(self) -> None:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                continue


async def open_by_metadata(task: Task) -> Env:
    env: Env = task["kind"]()
    return env


@pytest.mark.parametrize("mode", ["none", "thread", "process"])
async def test_all_calls_of_an_environment_are_made_in_one_task(
    mode: Mode, caplog: pytest.LogCaptureFixture
) -> None:
    factory = as_env_factory(open_by_metadata, spec=f"{__name__}:open_by_metadata")
    limits = replace(LIMITS, isolation=Isolation(mode=mode, worker_memory_gb=2))
    pids = []
    kinds = (SameTask, LeavingTask, StubbornTask, SameTask) if mode == "process" else (SameTask,)
    for kind in kinds:
        metadata = {"kind": kind, "check": lambda: 1}
        task = Task(key="t", env_key="counter", prompt="reach 3", metadata=metadata)
        played = await run_episode(task, factory, token_agent(ScriptedEngine(*LINES)), limits)
        assert (played.failure, played.reward) == (None, 1.0)
        pid, setting = played.turns[0].replies[0].text.split()
        assert setting == "kept"
        pids.append(pid)
    assert "closing" not in caplog.text
    if mode == "process":
        assert pids[0] == pids[1] == pids[2], "tasks that end leave a worker as it was"
        assert pids[3] != pids[2], "a worker with a task of another episode is not used again"


class Starting(CounterEnv):
    """Starts a program in a session of its own, and kills its worker."""

    async def reset(self) -> Observation:
        program = subprocess.Popen(  # noqa: ASYNC220
            ["sleep", "60"], start_new_session=True
        )
        return say(str(program.pid))

    async def step(self, action: Message) -> Step:
        time.sleep(60)  # noqa: ASYNC251
        raise AssertionError


class Leaving(CounterEnv):
    async def reset(self) -> Observation:
        return say(str(subprocess.Popen(["sleep", "600"]).pid))  # noqa: ASYNC220


async def wait_for_end(pid: int) -> None:
    for _ in range(500):
        if not Path(f"/proc/{pid}").exists():  # noqa: ASYNC240
            return
        await asyncio.sleep(0.02)
    os.kill(pid, 9)
    pytest.fail("it still runs")


async def test_killing_a_worker_kills_what_it_started() -> None:
    factory = as_env_factory(Starting, spec=f"{__name__}:Starting")
    trajectory = await played(factory, "process", trajectory_timeout_seconds=3)
    assert trajectory.grade is None
    kill_idle_workers()
    await wait_for_end(int(trajectory.prompt[0].text))


async def test_what_a_finished_environment_left_running_ends_with_its_worker() -> None:
    factory = as_env_factory(Leaving, spec=f"{__name__}:Leaving")
    trajectory = await played(factory, "process")
    assert trajectory.reward == 1.0
    await wait_for_end(int(trajectory.prompt[0].text))


async def test_a_cancelled_opening_leaves_no_worker() -> None:
    before = set(find_descendants(os.getpid()))
    for _ in range(3):
        running = asyncio.create_task(played(as_env_factory(CounterEnv), "process"))
        await asyncio.sleep(0.002)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    # The starter runs one job after the other, and kills a worker that nobody waits for.
    await asyncio.wrap_future(_starter().submit(int))
    assert set(find_descendants(os.getpid())) <= before


async def test_an_environment_in_a_thread_may_be_closed_twice() -> None:
    closed = []

    class Closing(CounterEnv):
        async def close(self) -> None:
            closed.append(1)

    async def open_env(task: Task) -> Env:
        return Closing()

    env = await open_in_thread(open_env, TASK, EnvGuard("counter", "t"))
    await env.close()
    await env.close()
    assert closed == [1]


class Loading(CounterEnv):
    """Blocks in the episodes that `blocks` names, and works only in the thread it was made for."""

    blocks: tuple[int, ...] = ()
    home = 0
    n = 0

    async def reset(self) -> Observation:
        type(self).n += 1
        if self.n in self.blocks:
            time.sleep(0.4)  # noqa: ASYNC251
        return await super().reset()

    async def step(self, action: Message) -> Step:
        if threading.get_ident() != self.home:
            raise RuntimeError("objects created in a thread can only be used in that same thread")
        where = f"{os.getpid()} {threading.get_ident()}"
        step = await super().step(action)
        return replace(step, messages=(Message(role="tool", content=where),))


@pytest.mark.parametrize(
    ("blocks", "n_failed"),
    [((1,), 0), ((1, 2), 1), ((1, 2, 4, 5, 7, 8), 2)],
    ids=["loads once", "blocks twice", "is tried twice"],
)
async def test_an_environment_that_cannot_work_elsewhere_stays_in_or_returns_to_the_event_loop(
    blocks: tuple[int, ...], n_failed: int, caplog: pytest.LogCaptureFixture
) -> None:
    members = {"blocks": blocks, "home": threading.get_ident()}
    factory = as_env_factory(type("Moved", (Loading,), members))
    trajectories = [await played(factory, "auto") for _ in range(9)]
    assert [t.ending for t in trajectories].count(Ending.FAILED) == n_failed
    assert place(trajectories[-1]) == "loop"
    assert ("failed (step: RuntimeError: objects created" in caplog.text) == (n_failed > 0)


def test_a_factory_that_nothing_else_holds_is_freed() -> None:
    def make() -> EnvFactory:
        async def open_env(task: Task) -> Env:
            return CounterEnv()

        return open_env

    factory = make()
    isolate(factory)
    held = weakref.ref(factory)
    del factory
    gc.collect()
    assert held() is None


async def test_only_a_thread_that_computes_is_blamed_for_the_interpreter_lock() -> None:
    computing, waiting = EnvGuard("computing", "t"), EnvGuard("waiting", "t")
    blamed: list[str] = []
    computing.on_stall = lambda _: blamed.append("computing")
    waiting.on_stall = lambda _: blamed.append("waiting")
    ends = threading.Event()

    def compute() -> None:
        while not ends.is_set():
            sum(range(1000))

    threads = {
        computing: threading.Thread(target=compute),
        waiting: threading.Thread(target=ends.wait),
    }
    for thread in threading.enumerate():
        if thread.name == "skyfleet watchdog":
            thread.join()  # it measures too
    async with EpisodeClock(60) as clock:
        try:
            for guards, expected in (((waiting,), []), ((waiting, computing), ["computing"])):
                for guard in guards:
                    if not threads[guard].is_alive():
                        threads[guard].start()
                    watchdog.enter_thread(guard, threads[guard])
                if computing in guards:
                    start = read_cpu_seconds(threads[computing])
                    while read_cpu_seconds(threads[computing]) < start + 0.2:
                        time.sleep(0.01)  # noqa: ASYNC251
                for state in watchdog._in_threads.values():
                    state.measure()
                before = clock.elapsed_seconds
                watchdog._give_back_lost(0.1, 0.0)
                assert clock.elapsed_seconds < before, "everybody gets the time back"
                assert blamed == expected
        finally:
            ends.set()
            for guard, thread in threads.items():
                watchdog.leave_thread(guard)
                thread.join()


@pytest.mark.parametrize("is_collecting", [True, False])
async def test_an_environment_is_not_blamed_for_a_garbage_collection(is_collecting: bool) -> None:
    monitor = find_monitor()
    monitor.watch(time.perf_counter())
    if is_collecting:
        stalls.time_collection("start", {})
    start = time.thread_time()
    while time.thread_time() - start < 0.3:
        pass
    if is_collecting:
        stalls.time_collection("stop", {})
    stall = monitor.explain_stall(0.1)
    assert (stall is None) == is_collecting
