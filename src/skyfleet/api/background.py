"""Run coroutines from sync code: one background thread with an event loop, and Ctrl-C."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import cache
from inspect import isawaitable
from threading import Event, Thread, current_thread
from typing import Any, TypeVar

from skyfleet.envs.event_loop import EnvEventLoop
from skyfleet.terminal import add_note

T = TypeVar("T")

_THREAD = "skyfleet loop"
_TURN_SECONDS = 0.2


@cache
def background_loop() -> asyncio.AbstractEventLoop:
    """The event loop of all sync calls. Its thread is a daemon and ends with the process.

    A notebook has a running loop in the main thread, so sync calls cannot use that one.
    """
    loop = EnvEventLoop()
    never = loop.create_future()
    Thread(target=loop.run_until_complete, args=(never,), name=_THREAD, daemon=True).start()
    return loop


def run_sync(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in the background loop and wait for it.

    Ctrl-C cancels it once and waits until it has saved and closed what it holds; a second Ctrl-C
    gives up waiting. If the coroutine ends by cancellation this raises KeyboardInterrupt.
    """
    loop, finished = background_loop(), Event()
    if current_thread().name == _THREAD:
        # A callback of a run that this loop trains: waiting for the loop would block it for good.
        with _block_loop():
            result: T = _run_in_new_thread(coroutine)
            return result
    started: list[asyncio.Task[T]] = []

    def start() -> None:
        task = loop.create_task(coroutine)
        task.add_done_callback(lambda _: finished.set())
        started.append(task)

    loop.call_soon_threadsafe(start)
    with _block_loop():
        try:
            _wait(finished)
        except KeyboardInterrupt:
            loop.call_soon_threadsafe(lambda: started[0].cancel())
            _wait(finished)
    (task,) = started
    if task.cancelled():
        raise KeyboardInterrupt
    return task.result()


def _wait(finished: Event) -> None:
    """Wait in short turns: the kernel may give SIGINT to another thread, which wakes nobody here."""
    while not finished.wait(_TURN_SECONDS):
        pass


_blocked: set[asyncio.AbstractEventLoop] = set()


@contextmanager
def _block_loop() -> Iterator[None]:
    """Note that the running loop of this thread, if there is one, waits in a sync call."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        yield
        return
    was_blocked = loop in _blocked
    _blocked.add(loop)
    try:
        yield
    finally:
        if not was_blocked:
            _blocked.discard(loop)


def is_responsive(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether the loop runs and does not wait in a sync call, so that it can be waited for."""
    return loop.is_running() and loop not in _blocked


class CallbackTasks:
    """Calls a user's callbacks, sync or async, from code that cannot await them.

    What an async one returns runs as a task of the caller's event loop, which `settle` waits for.
    In the background loop, whose caller waits anyway, it runs to its end at once.
    """

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[Any]] = []

    def wrap(self, callback: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            result = callback(*args)
            if not isawaitable(result):
                return result
            if current_thread().name == _THREAD:
                return _run_in_new_thread(result)
            self._tasks.append(asyncio.create_task(_name_failure(result, callback)))
            return None

        return call

    async def settle(self) -> list[Any]:
        """Wait for the async callbacks that were called; what they returned."""
        tasks, self._tasks = self._tasks, []
        return await asyncio.gather(*tasks)

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()


async def _name_failure(awaitable: Awaitable[Any], callback: object) -> Any:
    try:
        return await awaitable
    except Exception as error:
        add_note(error, f"raised by the callback {getattr(callback, '__name__', callback)}")
        raise


def _run_in_new_thread(awaitable: Any) -> Any:
    """Run an awaitable in a thread and a loop of its own, and wait for it."""
    outcome: list[Any] = []
    failure: list[BaseException] = []

    async def wait() -> Any:
        return await awaitable

    def run() -> None:
        try:
            outcome.append(asyncio.run(wait()))
        except BaseException as error:
            failure.append(error)

    thread = Thread(target=run, name="skyfleet callback")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]
