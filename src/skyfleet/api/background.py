"""Run coroutines from sync code: one background thread with an event loop, and Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from inspect import isawaitable
from threading import Event, Lock, Thread, current_thread
from typing import Any, TypeVar

from skyfleet.api.terminating import take_signal, wait_for_signals
from skyfleet.envs.event_loop import EnvEventLoop
from skyfleet.errors import SkyfleetError
from skyfleet.streams import open_stdout
from skyfleet.terminal import add_note

T = TypeVar("T")

_THREAD = "skyfleet loop"
_TURN_SECONDS = 0.2


class _Background:
    """An event loop in a daemon thread, which ends with the process.

    A notebook has a running loop in the main thread, so sync calls cannot use that one.
    """

    def __init__(self) -> None:
        self.loop, self.failure = EnvEventLoop(), "it was stopped"
        self._thread = Thread(target=self._run, name=_THREAD, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """False after a failure of the loop itself, and in a forked process."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.loop.run_until_complete(self.loop.create_future())
        except BaseException as error:
            self.failure = f"{type(error).__name__}: {error}"


_backgrounds: list[_Background] = []
"""The last one is used. One that has died is kept: what it held must not be closed at random."""
_starting = Lock()


def _find_background() -> _Background:
    with _starting:
        if not _backgrounds or not _backgrounds[-1].is_alive:
            _backgrounds.append(_Background())
        return _backgrounds[-1]


def background_loop() -> asyncio.AbstractEventLoop:
    """The event loop of all sync calls."""
    return _find_background().loop


class BackgroundLoopError(SkyfleetError, RuntimeError):
    """The thread of the background event loop has died, and with it what ran there."""


def run_sync(coroutine: Coroutine[Any, Any, T], *, on_interrupt: str | None = None) -> T:
    """Run a coroutine in the background loop and wait for it.

    Ctrl-C cancels it once and waits until it has saved and closed what it holds; a second Ctrl-C
    gives up waiting. If the coroutine ends by cancellation this raises KeyboardInterrupt. A signal
    inside `exit_after_saving` cancels it, too, and then exits. `on_interrupt` is printed meanwhile.
    """
    background, finished = _find_background(), Event()
    loop = background.loop
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
    with _block_loop(), wait_for_signals():
        try:
            sent = _wait(finished, background)
        except KeyboardInterrupt:
            sent = signal.SIGINT
        if sent is not None:
            loop.call_soon_threadsafe(lambda: started[0].cancel())
            if on_interrupt is not None:
                _print(on_interrupt)
            while _wait(finished, background) is not None:
                pass  # the same signal again
        sent = sent or take_signal()
    (task,) = started
    if sent not in (None, signal.SIGINT) and (task.cancelled() or task.exception() is None):
        raise SystemExit(128 + sent)
    if task.cancelled():
        raise KeyboardInterrupt
    return task.result()


def _wait(finished: Event, background: _Background) -> signal.Signals | None:
    """Wait until it is finished, or for a signal.

    In short turns: the kernel may give SIGINT to another thread, which wakes nobody here.
    """
    while not finished.wait(_TURN_SECONDS):
        if (sent := take_signal()) is not None:
            return sent
        if not background.is_alive and not finished.is_set():
            raise BackgroundLoopError(
                f"the event loop of skyfleet died ({background.failure}) and with it this call; code "
                "in this process, such as an environment or a reward, probably closed file "
                "descriptors that it did not open: set environment.isolation=process, or correct it, "
                "and start the program again"
            )
    return None


def _print(sentence: str) -> None:
    stdout = open_stdout()
    stdout.write(f"\n{sentence}\n")
    stdout.flush()


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
