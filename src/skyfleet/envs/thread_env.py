"""ThreadEnv: an environment with a thread and an event loop of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from threading import Thread
from typing import Any

from skyfleet.chat.message import Message
from skyfleet.envs.env import Env, EnvFactory, Observation, Step, close_env, grade_env
from skyfleet.envs.guard import EnvGuard, current_guard, install_task_factory
from skyfleet.envs.guarded_call import abandoned_calls
from skyfleet.envs.stalls import enter_thread, interrupt_thread, leave_thread
from skyfleet.errors import EnvError, EpisodeError, VerifierError
from skyfleet.tasks.task import Grade, Task

_OTHER_LOOP = ("a different event loop", "a different loop")
"""In asyncio's errors for an object that belongs to another event loop."""
_END_SECONDS = 1.0
"""For the tasks that an environment leaves behind."""


class LoopThread:
    """An event loop in a daemon thread, which goes on whatever its callbacks raise."""

    def __init__(self, guard: EnvGuard, *, on_other_loop: Callable[[], None]) -> None:
        """`guard` makes the calls; it belongs to this loop alone. `on_other_loop` is called if the
        environment uses an object that belongs to another event loop."""
        self._guard, self._ended = guard, False
        self._on_other_loop = on_other_loop
        self._loop = asyncio.new_event_loop()
        install_task_factory(self._loop)
        self._thread = Thread(target=self._run, name=f"env {guard.task_key}", daemon=True)
        self._thread.start()

    async def call(
        self, kind: type[EpisodeError], during: str, function: Callable[..., Any], *args: Any
    ) -> Any:
        outer = current_guard.get()
        calling = self._guard.call(kind, during, function, *args)
        enter_thread(outer)
        try:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(calling, self._loop))
        except EpisodeError as error:
            if any(sign in str(error) for sign in _OTHER_LOOP):
                self._on_other_loop()
            raise
        finally:
            leave_thread(outer)

    def interrupt(self) -> None:
        """Interrupt code that blocks the loop; what waits in C goes on."""
        if self._is_blocked and self._thread.ident is not None:
            interrupt_thread(self._thread.ident)

    def end(self) -> None:
        """End the loop, or leave a thread that is blocked to end when it can."""
        self._ended = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        if self._is_blocked:
            self.interrupt()
            abandoned_calls.add(self._guard.env_key, self._thread.is_alive)

    @property
    def _is_blocked(self) -> bool:
        return self._guard.holds_loop

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._ended:
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
        self._thread.interrupt()
        try:
            await self._thread.call(EnvError, "close", close_env, self._env)
        finally:
            self._thread.end()


async def open_in_thread(
    open_env: EnvFactory, task: Task, guard: EnvGuard, *, on_other_loop: Callable[[], None]
) -> ThreadEnv:
    inner = EnvGuard(
        task.env_key,
        task.key,
        limit_seconds=guard.limit_seconds,
        cancel_grace_seconds=guard.cancel_grace_seconds,
        is_isolated=True,
    )
    thread = LoopThread(inner, on_other_loop=on_other_loop)
    try:
        env = await thread.call(EnvError, f"opening {task.env_key}", open_env, task)
    except BaseException:
        thread.end()
        raise
    return ThreadEnv(env, thread)
