"""EnvTask: make all calls of one environment in one task, in order.

A task group, a cancel scope or a context variable that `reset` enters or sets is then the same in
`step` and `close`, as it is for an environment in the event loop of the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any

from skyfleet.envs.guard import EnvGuard, current_guard
from skyfleet.errors import EnvError, EpisodeError


@dataclass(slots=True, kw_only=True, eq=False)
class EnvCall:
    kind: type[EpisodeError]
    during: str
    function: Callable[..., Any]
    args: Sequence[Any]
    variables: Sequence[tuple[ContextVar[Any], Any]] = ()
    """Set before the call, in the context of the task."""
    future: Future[Any] = field(default_factory=Future)
    """The result, or CancelledError if the call was cancelled as asked."""
    is_cancelled: bool = False


class EnvTask:
    """All methods but the constructor belong to the thread of the event loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, guard: EnvGuard, *, on_end: Callable[[], None]
    ) -> None:
        """`guard` makes the calls. `on_end` is called after the last one. The loop may be one that
        does not run yet."""
        self._guard, self._n_requests = guard, 0
        self._calls: asyncio.Queue[EnvCall | None] = asyncio.Queue()
        self._running: EnvCall | None = None
        self._is_ended = False
        guard.count_requests = lambda: self._n_requests
        self._task = _outer_context().run(loop.create_task, self._serve())
        self._task.add_done_callback(lambda _: self._fail_calls())
        self._task.add_done_callback(lambda _: on_end())

    def put(self, call: EnvCall) -> None:
        self._calls.put_nowait(call)

    def end(self) -> None:
        """End the task after the calls that were put before."""
        self._is_ended = True
        self._calls.put_nowait(None)

    def cancel(self, call: EnvCall) -> None:
        """Cancel the call if it runs, or does not run yet."""
        call.is_cancelled = True
        if self._running is call:
            self._n_requests += 1
            self._task.cancel()

    async def _serve(self) -> None:
        with self._guard:
            while (call := await self._next()) is not None:
                self._running, self._n_requests = call, 0
                for variable, value in call.variables:
                    variable.set(value)
                await self._answer(call)

    async def _next(self) -> EnvCall | None:
        while True:
            try:
                return await self._calls.get()
            except asyncio.CancelledError:
                # By something of the environment's; the guard reports it in the next call.
                if self._is_ended:
                    return None

    async def _answer(self, call: EnvCall) -> None:
        try:
            if call.is_cancelled:
                raise asyncio.CancelledError
            result = await self._guard.call(call.kind, call.during, call.function, *call.args)
        except BaseException as error:
            self._finish()
            call.future.set_exception(error)
        else:
            self._finish()
            call.future.set_result(result)

    def _fail_calls(self) -> None:
        """Whatever ended the task, nobody waits for a reply that does not come."""
        calls = [self._running]
        while not self._calls.empty():
            calls.append(self._calls.get_nowait())
        for call in calls:
            if call is not None and not call.future.done():
                call.future.set_exception(EnvError(f"{call.during}: its event loop has ended"))

    def _finish(self) -> None:
        self._running = None
        for _ in range(self._n_requests):
            self._task.uncancel()
        self._n_requests = 0


def _outer_context() -> Context:
    """The caller's context, but for the guard, whose event loop is another one."""
    context = copy_context()
    context.run(current_guard.set, None)
    return context
