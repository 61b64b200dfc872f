"""EnvThread: run the blocking calls of one environment in order, in a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any

from skyfleet.errors import EnvError


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
        Thread(target=self._serve, name=name, daemon=True).start()

    @property
    def stuck(self) -> bool:
        """Whether an abandoned call has not returned."""
        return self._latest is not None and not self._latest.done()

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        async with self._slots:
            return await asyncio.wrap_future(self._put(partial(function, *args)))

    def end_with(self, function: Callable[[], None]) -> None:
        """Make one last call after the calls before it have returned, if they ever do."""
        self._put(function)
        self.end()

    def end(self) -> None:
        self._calls.put(None)

    def _put(self, call: Callable[[], Any]) -> Future[Any]:
        self._latest = Future()
        self._calls.put((self._latest, call))
        return self._latest

    def _serve(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)
            except BaseException as error:
                # sys.exit in an environment ends its episode, not the run.
                future.set_exception(EnvError(f"the env raised {error!r}"))
