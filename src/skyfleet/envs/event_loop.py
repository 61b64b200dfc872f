"""Run an event loop whose environments may stop it, exit in a callback, or leave what never ends."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import traceback
from collections.abc import Callable, Coroutine
from contextvars import Context
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

from skyfleet.envs.guard import EnvGuard, current_guard
from skyfleet.envs.guarded_call import is_ctrl_c
from skyfleet.envs.stalls import EnvInterrupt

logger = logging.getLogger(__name__)

T = TypeVar("T")

END_SECONDS = 5.0
"""For the threads and async generators that environments leave behind."""
_stuck: list[object] = []
_OWN_MODULES = ("skyfleet.", "asyncio.")
"""Their callbacks are never interrupted."""


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, for a coroutine that plays episodes."""
    with asyncio.Runner(loop_factory=EnvEventLoop) as runner:
        return runner.run(main)


def has_stuck_code() -> bool:
    """Whether something of an environment would keep the interpreter from exiting."""
    return bool(_stuck)


class EnvEventLoop(asyncio.SelectorEventLoop):
    """Runs until the coroutine that it was started with has ended, whatever its callbacks do."""

    _awaited: asyncio.Future[Any] | None = None
    _is_forked = False

    def __init__(self) -> None:
        super().__init__()
        _loops.add(self)

    def run_until_complete(self, future: Any) -> Any:
        self._awaited = asyncio.ensure_future(future, loop=self)
        if self._awaited is not future:
            # As the base class does for a coroutine: Ctrl-C may leave it pending.
            self._awaited._log_destroy_pending = False  # type: ignore[union-attr]
        try:
            return super().run_until_complete(self._awaited)
        finally:
            self._awaited = None

    def run_forever(self) -> None:
        while True:
            try:
                super().run_forever()
                if not self._goes_on:
                    return
                logger.warning("an environment stopped the event loop of the run, which goes on")
            except (SystemExit, KeyboardInterrupt) as error:
                if not self._goes_on or is_ctrl_c(error):
                    raise
                _warn(error)

    @property
    def _goes_on(self) -> bool:
        return self._awaited is not None and not self._awaited.done()

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        if self._is_forked:
            os._exit(0)
        return super().call_soon(_guard_callback(callback, context), *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return super().call_at(when, _guard_callback(callback, context), *args, context=context)

    async def shutdown_asyncgens(self) -> None:
        await self._wait(super().shutdown_asyncgens(), "an async generator")

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # noqa: ASYNC109
        await self._wait(super().shutdown_default_executor(), "a thread")

    async def _wait(self, closing: Coroutine[Any, Any, None], what: str) -> None:
        """Python's own loop waits without end."""
        task = self.create_task(closing)
        await asyncio.wait({task}, timeout=END_SECONDS)
        if not task.done():
            _stuck.append(task)
            logger.warning("an environment left %s behind that does not end", what)


_loops: WeakSet[EnvEventLoop] = WeakSet()


def _mark_forked() -> None:
    """In the child of `os.fork`, which shares the descriptors of these loops with its parent.

    An environment that forks and lets the child return would continue the run a second time there:
    the child ends when it reaches the loop. Loops that the child makes are its own.
    """
    for loop in _loops:
        loop._is_forked = True


os.register_at_fork(after_in_child=_mark_forked)


def _guard_callback(callback: Callable[..., Any], context: Context | None) -> Callable[..., Any]:
    """Account for a callback that an environment schedules as for its calls; others stay as they are."""
    guard = current_guard.get() if context is None else context.get(current_guard)
    if guard is None or isinstance(getattr(callback, "__self__", None), asyncio.Future):
        return callback  # the steps of tasks are accounted for elsewhere
    if (getattr(callback, "__module__", None) or "").startswith(_OWN_MODULES):
        return callback
    return partial(_run_callback, guard, callback)


def _run_callback(guard: EnvGuard, callback: Callable[..., Any], *args: Any) -> None:
    try:
        guard.measure_callback(callback, *args)
    except EnvInterrupt:
        logger.warning(
            "a callback of environment %s held the event loop beyond the limit of its episode and was "
            "interrupted (task %s)",
            guard.env_key,
            guard.task_key,
        )


def _warn(error: BaseException) -> None:
    """Of a callback; the exception of a task is for whoever waits for the task."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if any(frame.f_code.co_flags & inspect.CO_COROUTINE for frame in frames):
        return
    last = traceback.extract_tb(error.__traceback__)[-1]
    logger.warning(
        "a callback raised %s at %s:%s, which would end the run; the run goes on",
        type(error).__name__,
        last.filename,
        last.lineno,
    )
