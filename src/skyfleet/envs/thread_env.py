"""ThreadEnv: an environment with a thread and an event loop of its own."""

from __future__ import annotations

import asyncio
from asyncio import CancelledError
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import Any

from skyfleet.chat.message import Message
from skyfleet.envs.env import (
    Env,
    EnvFactory,
    Observation,
    Step,
    close_env,
    episode_ending,
    episode_info,
    grade_env,
)
from skyfleet.envs.env_task import EnvCall, EnvTask
from skyfleet.envs.env_thread import mark_retrieved
from skyfleet.envs.guard import EnvGuard, current_guard, install_task_factory
from skyfleet.envs.guarded_call import abandoned_calls
from skyfleet.envs.stalls import is_interrupted
from skyfleet.envs.watchdog import enter_thread, leave_thread
from skyfleet.errors import EnvError, EpisodeError, VerifierError
from skyfleet.tasks.task import Grade, Task
from skyfleet.trajectories.episode_clock import current_clock

_END_SECONDS = 1.0
"""For the last call, and for the tasks that an environment leaves behind."""
_BLOCKED_SECONDS = 0.5
"""A cancelled call that holds its thread for so long is abandoned; the watchdog interrupts it first."""
_VARIABLES = (current_clock, episode_ending, episode_info)
"""What a call in the thread gets from the context of its caller."""


class LoopThread:
    """An event loop in a daemon thread, which goes on whatever its callbacks raise."""

    def __init__(self, guard: EnvGuard) -> None:
        """`guard` makes the calls; it belongs to this loop alone."""
        self._guard, self._is_stopped = guard, False
        self.is_abandoned = False
        """Whether a call holds the thread although it was cancelled."""
        self._loop = asyncio.new_event_loop()
        install_task_factory(self._loop)
        self._task = EnvTask(self._loop, guard, on_end=self._stop)
        self._thread = Thread(target=self._run, name=f"env {guard.task_key}", daemon=True)
        self._thread.start()

    async def call(
        self, kind: type[EpisodeError], during: str, function: Callable[..., Any], *args: Any
    ) -> Any:
        outer = current_guard.get()
        call = self.put(kind, during, function, *args)
        waiting = asyncio.wrap_future(call.future)
        waiting.add_done_callback(mark_retrieved)
        enter_thread(outer, self._thread)
        try:
            return await asyncio.shield(waiting)
        except CancelledError:
            if not waiting.done():
                await self._cancel(call, waiting, outer)
            if waiting.done() and is_interrupted(error := waiting.exception()):
                raise error from error.__cause__
            raise
        finally:
            leave_thread(outer)

    def put(
        self, kind: type[EpisodeError], during: str, function: Callable[..., Any], *args: Any
    ) -> EnvCall:
        variables = [(variable, variable.get()) for variable in _VARIABLES]
        call = EnvCall(kind=kind, during=during, function=function, args=args, variables=variables)
        self._loop.call_soon_threadsafe(self._task.put, call)
        return call

    async def _cancel(
        self, call: EnvCall, waiting: asyncio.Future[Any], outer: EnvGuard | None
    ) -> None:
        """Cancel the call and wait for its end, unless it holds the thread and does not end."""
        guard = self._guard
        guard.must_end = True
        self._loop.call_soon_threadsafe(self._task.cancel, call)
        while not waiting.done():
            since = guard.held_since
            await asyncio.wait({waiting}, timeout=_BLOCKED_SECONDS)
            if since is not None and guard.held_since == since and not waiting.done():
                self.is_abandoned = True
                if outer is not None:
                    outer.abandoned = True
                return

    def end(self) -> None:
        """End the loop, or leave a thread that is blocked to end when it can."""
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._end)
        if self._guard.holds_loop:
            abandoned_calls.add(self._guard.calls_key, self._thread.is_alive)

    def _end(self) -> None:
        self._task.end()
        self._loop.call_later(_END_SECONDS, self._stop)

    def _stop(self) -> None:
        if not self._is_stopped:
            self._is_stopped = True
            self._loop.stop()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._is_stopped:
            try:
                self._loop.run_forever()
            except BaseException:  # sys.exit in a callback, or an interrupt
                continue
        try:
            self._cancel_tasks()
        except BaseException:
            pass
        finally:
            asyncio.set_event_loop(None)
            self._loop.close()

    def _cancel_tasks(self) -> None:
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=_END_SECONDS))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())


class ThreadEnv:
    def __init__(self, env: Env, thread: LoopThread) -> None:
        self._env, self._thread = env, thread
        self._steps: list[Step] = []
        self._is_closed = False

    async def reset(self) -> Observation:
        observation: Observation = await self._thread.call(EnvError, "reset", self._env.reset)
        return observation

    async def step(self, action: Message) -> Step:
        step: Step = await self._thread.call(EnvError, "step", self._env.step, action)
        self._steps.append(step)
        return step

    async def grade(self) -> Grade | None:
        grade: Grade | None = await self._thread.call(
            VerifierError, "grade", grade_env, self._env, self._steps
        )
        return grade

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._thread.is_abandoned:
                # It is closed when the call that holds the thread has returned, if it ever does.
                self._thread.put(EnvError, "close", close_env, self._env)
            else:
                await self._thread.call(EnvError, "close", close_env, self._env)
        finally:
            self._thread.end()


async def open_in_thread(open_env: EnvFactory, task: Task, guard: EnvGuard) -> ThreadEnv:
    inner = EnvGuard(
        task.env_key,
        task.key,
        limit_seconds=guard.limit_seconds,
        cancel_grace_seconds=guard.cancel_grace_seconds,
        is_isolated=True,
    )
    inner.calls_key = guard.calls_key
    thread = LoopThread(inner)
    try:
        env = await thread.call(EnvError, f"opening {task.env_key}", open_env, task)
    except BaseException:
        thread.end()
        raise
    return ThreadEnv(env, thread)
