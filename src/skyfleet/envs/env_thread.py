"""EnvThread: run the blocking calls of one environment in order, in a thread of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any

from skyfleet.envs.guard import current_guard
from skyfleet.envs.guarded_call import abandoned_calls
from skyfleet.envs.stalls import EnvInterrupt, interrupt_thread
from skyfleet.envs.values import describe_error, format_value
from skyfleet.envs.watchdog import enter_thread, leave_thread
from skyfleet.errors import EnvError


def mark_retrieved(future: asyncio.Future[Any]) -> None:
    """An error that came after its call was abandoned is not logged."""
    if not future.cancelled():
        future.exception()


class EnvThread:
    """One thread for all calls, because SQLite and others accept only the thread that opened them.

    It is a daemon: a call that never returns blocks neither other episodes nor the interpreter.
    """

    def __init__(self, name: str, slots: asyncio.Semaphore) -> None:
        """`slots` bounds the concurrent calls of all environments that share it; a call that is
        abandoned releases its slot."""
        self._slots = slots
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._latest: Future[Any] | None = None
        self._running: Future[Any] | None = None
        self._thread = Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @property
    def stuck(self) -> bool:
        """Whether an abandoned call has not returned."""
        return self._latest is not None and not self._latest.done()

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        guard = current_guard.get()
        async with self._slots:
            enter_thread(guard, self._thread)
            try:
                return await asyncio.wrap_future(self._put(partial(function, *args)))
            finally:
                leave_thread(guard)

    def submit(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Make a call without a slot, which goes on when its caller is cancelled."""
        future = asyncio.wrap_future(self._put(partial(function, *args)))
        future.add_done_callback(mark_retrieved)
        return future

    def interrupt(self) -> None:
        """Interrupt a call that was abandoned and still runs; one that waits in C goes on."""
        if self._running is not None and self._thread.ident is not None:
            interrupt_thread(self._thread.ident)

    def end_with(self, function: Callable[[], None]) -> None:
        """Make one last call after the calls before it have returned, if they ever do."""
        self._put(function)
        self.end()

    def end(self) -> None:
        """End the thread; a call that still runs is interrupted, and counted if that fails."""
        self._calls.put(None)
        if self._running is not None:
            self.interrupt()
            if (guard := current_guard.get()) is not None:
                abandoned_calls.add(guard.calls_key, self._thread.is_alive)

    def _put(self, call: Callable[[], Any]) -> Future[Any]:
        self._latest = Future()
        self._calls.put((self._latest, call))
        return self._latest

    def _serve(self) -> None:
        process = os.getpid()
        while True:
            try:
                item = self._calls.get()
                if item is None:
                    return
                self._run(*item)
            except EnvInterrupt:  # it came when the call had just returned
                self._running = None
            if os.getpid() != process:  # the call forked, and this is the child
                os._exit(0)

    def _run(self, future: Future[Any], call: Callable[[], Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        self._running = future
        try:
            result = call()
        except StopIteration as error:
            # A future cannot hold it: whoever waits would wait for ever.
            self._running = None
            future.set_exception(RuntimeError(f"it raised {describe_error(error)}"))
        except Exception as error:
            self._running = None
            future.set_exception(error)
        except BaseException as error:
            # sys.exit in an environment ends its episode, not the run.
            self._running = None
            future.set_exception(EnvError(f"the env raised {format_value(error)}"))
        else:
            self._running = None
            future.set_result(result)
