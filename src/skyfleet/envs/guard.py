"""EnvGuard: make the calls of one episode's environment so that they can hurt only that episode.

The guard drives the environment's coroutine itself, step by step, inside the episode's task. So it
sees every exception before the event loop does, measures how long the environment holds the loop,
and can abandon a call that ignores its cancellation. A call that never waits costs no task switch.
"""

from __future__ import annotations

import asyncio
import inspect
from asyncio import CancelledError
from collections.abc import Callable, Coroutine
from contextlib import nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from types import CoroutineType, TracebackType
from typing import Any, Literal

from skyfleet.envs.guarded_call import GuardedCall, is_ctrl_c
from skyfleet.envs.stalls import (
    STALL_SECONDS,
    EnvInterrupt,
    LoopMonitor,
    find_monitor,
    give_back,
    log_stall,
)
from skyfleet.envs.values import describe_error, format_value
from skyfleet.envs.watchdog import unwatch, watch
from skyfleet.errors import EnvError, EpisodeError
from skyfleet.trajectories.episode_clock import EpisodeClock, current_clock

Mode = Literal["auto", "none", "thread", "process"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """Where a user's environment runs; `envs/isolation.py` reads it."""

    mode: Mode = "auto"
    worker_memory_gb: float = 8
    """Address space of a worker process."""
    max_observation_chars: int = 0
    """A worker cuts longer observations before it sends them; 0 cuts nothing."""


class EnvGuard:
    """Calls the environment of one episode."""

    __slots__ = (
        "__weakref__",
        "_is_entered",
        "_monitor",
        "_n_requests",
        "abandoned",
        "calls_key",
        "cancel_grace_seconds",
        "clock",
        "count_requests",
        "during",
        "env_key",
        "is_closing",
        "is_isolated",
        "isolation",
        "limit_seconds",
        "must_end",
        "on_stall",
        "own_cancels",
        "task",
        "task_key",
    )

    def __init__(
        self,
        env_key: str,
        task_key: str,
        *,
        limit_seconds: float = 0,
        cancel_grace_seconds: float = 30,
        isolation: Isolation | None = None,
        is_isolated: bool = False,
    ) -> None:
        """A call that was cancelled gets `cancel_grace_seconds` to end."""
        self.env_key, self.task_key = env_key, task_key
        self.limit_seconds, self.cancel_grace_seconds = limit_seconds, cancel_grace_seconds
        self.calls_key: tuple[str, int] = (env_key, 0)
        """Under which abandoned calls count: the environment and what opens it."""
        self.isolation = isolation
        """How the environment's factory may isolate it; None: not at all."""
        self.is_isolated = is_isolated
        """Whether its event loop runs no other environment."""
        self.during = "opening"
        self.clock: EpisodeClock | None = None
        self.task: asyncio.Task[Any] | None = None
        self.count_requests: Callable[[], int] | None = None
        """How often the run has cancelled `task`; None if only the environment's own cancellations
        are known."""
        self._n_requests = 0
        """Cancellations by the run and by a clock, when the call began."""
        self.own_cancels = 0
        """How often the environment was seen to cancel the task of its own episode."""
        self.must_end = False
        """The call that runs is interrupted if it holds its thread."""
        self.abandoned = self.is_closing = False
        self.on_stall: Callable[[bool], None] | None = None
        """Set by the factory that opened the environment; called if it blocks."""
        self._monitor: LoopMonitor | None = None
        self._is_entered = False

    def __enter__(self) -> EnvGuard:
        self._monitor = monitor = find_monitor()
        self.task, self._is_entered = asyncio.current_task(), True
        install_task_factory(monitor.loop)
        monitor.is_isolated = self.is_isolated
        watch(monitor)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._monitor is not None
        unwatch(self._monitor)
        self._monitor, self.task, self._is_entered = None, None, False

    @property
    def holds_loop(self) -> bool:
        """Whether its environment runs now, seen from another thread."""
        return self._monitor is not None and self._monitor.running is self

    @property
    def held_since(self) -> float | None:
        """Since when its environment runs without a pause, seen from another thread."""
        monitor = self._monitor
        return monitor.since if monitor is not None and monitor.running is self else None

    def has_expired(self, held_seconds: float) -> bool:
        """Whether a call that has held a thread for so long is beyond the episode's limit."""
        if self.must_end or (self.clock is not None and self.clock.has_expired):
            return True
        return 0 < self.limit_seconds < held_seconds

    async def call(
        self,
        kind: type[EpisodeError],
        during: str,
        function: Callable[..., Any],
        *args: Any,
        convert: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Await `function(*args)`, and `convert` its result.

        Whatever it raises becomes an EpisodeError, by default `kind`. Only the cancellation of the
        episode and the user's Ctrl-C pass through.
        """
        if not self._is_entered:  # its calls may come from several tasks
            self.task, self._monitor, self.own_cancels = asyncio.current_task(), find_monitor(), 0
        task, monitor = self.task, self._monitor
        assert task is not None
        assert monitor is not None
        self._n_requests = n_cancels = 0
        if task.cancelling():
            self._n_requests = self._count_requests()
            await self._settle_before(during)
            n_cancels = task.cancelling()
        self.during, self.clock, self.must_end = during, current_clock.get(), False
        previous = current_guard.set(self)
        inner, is_over, result = None, False, None
        try:
            # Most calls end without waiting; for them this is all there is.
            since = monitor.start(self)
            try:
                inner = function(*args)
                if type(inner) is not CoroutineType:
                    inner = self._as_coroutine(inner)
                result = inner.send(None)
            except StopIteration as stop:
                is_over, result = inner is not None, stop.value
            finally:
                if (held := monitor.stop() - since) > STALL_SECONDS:
                    self.give_back(held, monitor)
                self.own_cancels += max(0, task.cancelling() - n_cancels)
            if not is_over:
                result = await GuardedCall(self, monitor, task, n_cancels, inner).drive(result)
            elif task.cancelling() > n_cancels:
                await GuardedCall(self, monitor, task, n_cancels, inner).settle()
            return result if convert is None else self._measure(monitor, convert, result)
        except BaseException as error:
            if isinstance(error, CancelledError) and task.cancelling() > n_cancels:
                await GuardedCall(self, monitor, task, n_cancels, inner).settle()
            if self._passes(error, task, n_cancels):
                raise
            raise self._describe(monitor, error, kind) from error
        finally:
            current_guard.reset(previous)

    def _passes(self, error: BaseException, task: asyncio.Task[Any], n_cancels: int) -> bool:
        """Whether an exception leaves the call as it is."""
        if isinstance(error, CancelledError) and self.is_cancelled(task, n_cancels):
            return True
        return _is_plain(error) or self.is_closing or is_ctrl_c(error)

    async def settle(self) -> None:
        """After a cancellation that arrived between two calls: EnvError if it is the environment's.

        A task group or a time limit that it entered and has not left cancels the episode's task at
        any time. The run's cancellation, or a clock's, goes on as it is.
        """
        if self.task is not None and self._monitor is not None:
            await GuardedCall(self, self._monitor, self.task, 0, None).settle()

    async def _settle_before(self, during: str) -> None:
        if self.count_requests is not None:
            with suppress(EnvError) if during == "close" else nullcontext():
                await self.settle()

    def _count_requests(self) -> int:
        clock = current_clock.get()
        by_clock = 0 if clock is None else clock.count_cancels(self.task)
        return by_clock + (0 if self.count_requests is None else self.count_requests())

    @property
    def is_cancelled_from_outside(self) -> bool:
        """Whether the run or a clock has cancelled the task of the episode."""
        return self._count_requests() > 0

    def is_cancelled(self, task: asyncio.Task[Any], n_cancels: int) -> bool:
        """Whether the run or a clock has cancelled the task since the call began."""
        if self.count_requests is None:
            return task.cancelling() > n_cancels
        return self._count_requests() > self._n_requests

    def count_own_cancels(self, task: asyncio.Task[Any], n_cancels: int) -> int:
        """How many cancellations of the task are the environment's own, and not undone.

        Cancel scopes of anyio do both.
        """
        if self.count_requests is None:
            return max(0, min(self.own_cancels, task.cancelling() - n_cancels))
        return max(0, task.cancelling() - self._count_requests())

    def _measure(self, monitor: LoopMonitor, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that may run the environment's code: methods of what it returned."""
        since = monitor.start(self)
        try:
            return function(*args)
        finally:
            if (held := monitor.stop() - since) > STALL_SECONDS:
                self.give_back(held, monitor)

    def measure_callback(self, callback: Callable[..., Any], *args: Any) -> None:
        """Run a callback that its environment scheduled in the running event loop."""
        self._measure(find_monitor(), callback, *args)

    def _describe(
        self, monitor: LoopMonitor, error: BaseException, kind: type[EpisodeError]
    ) -> EpisodeError:
        try:
            described: EpisodeError = self._measure(monitor, self._wrap, error, kind)
        except BaseException:  # the interrupt of an endless __str__
            return kind(f"{self.during}: an exception without a text")
        return described

    def _wrap(self, error: BaseException, kind: type[EpisodeError]) -> EpisodeError:
        if isinstance(error, EnvInterrupt):
            remedy = "" if self.is_isolated else ", or set environment.isolation=thread"
            return EnvError(
                f"{self.during}: held its thread beyond the limit of {self.limit_seconds:g} s "
                "(generator.trajectory_timeout_seconds) and was interrupted; await what takes "
                f"long{remedy}"
            )
        if isinstance(error, CancelledError):
            return kind(f"{self.during}: CancelledError: it cancelled a task that it waits for")
        return kind(f"{self.during}: {describe_error(error)}")

    def _as_coroutine(self, awaitable: object) -> Any:
        if inspect.iscoroutine(awaitable):
            return awaitable
        if inspect.isawaitable(awaitable):
            return _await(awaitable)
        raise EnvError(
            f"{self.during} returned {format_value(awaitable)}, which cannot be awaited; "
            "write async def"
        )

    def give_back(self, seconds: float, monitor: LoopMonitor) -> None:
        """Its environment held the event loop: the other episodes get that time back."""
        give_back(seconds, except_for=[current_clock.get()])
        if (stall := monitor.explain_stall(seconds)) is not None:
            self.report_stall(seconds, stall.line, holds_interpreter=stall.holds_interpreter)

    def report_stall(self, seconds: float, line: str, *, holds_interpreter: bool = False) -> None:
        """Name the environment, once, and start its later episodes elsewhere."""
        if self.is_isolated:
            return
        if self.on_stall is not None:
            self.on_stall(holds_interpreter)
        log_stall(self, seconds, line, holds_interpreter=holds_interpreter)


def _is_plain(error: BaseException) -> bool:
    """Whether it is an EpisodeError whose text takes none of the environment's code."""
    if not isinstance(error, EpisodeError):
        return False
    has_own_text = type(error).__str__ is not EpisodeError.__str__
    return not has_own_text and all(type(argument) is str for argument in error.args)


async def _await(awaitable: Any) -> Any:
    return await awaitable


current_guard: ContextVar[EnvGuard | None] = ContextVar("current_guard", default=None)
"""The guard whose environment is being called; tasks that the environment starts inherit it."""


def install_task_factory(loop: asyncio.AbstractEventLoop) -> None:
    """Drive the tasks that environments start: sys.exit in one would end the event loop."""
    present = loop.get_task_factory()
    if getattr(present, "guards_environments", False):
        return

    def create(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> Any:
        guard = current_guard.get()
        is_inner = guard is not None and inspect.iscoroutine(coro)
        run = _run_inner(guard, coro) if guard is not None and is_inner else coro
        if present is not None:
            task = present(loop, run, **options)
        else:
            task = asyncio.Task(run, loop=loop, **options)
        if is_inner:
            # A task that is cancelled before it starts never reaches the coroutine.
            task.add_done_callback(lambda _: _close_unstarted(coro))
        return task

    create.guards_environments = True  # type: ignore[attr-defined]
    loop.set_task_factory(create)


def _close_unstarted(coro: Coroutine[Any, Any, Any]) -> None:
    if inspect.getcoroutinestate(coro) == inspect.CORO_CREATED:
        coro.close()


async def _run_inner(guard: EnvGuard, coro: Coroutine[Any, Any, Any]) -> Any:
    task = asyncio.current_task()
    assert task is not None
    monitor = find_monitor()  # not the guard's: it may belong to another event loop
    call = GuardedCall(guard, monitor, task, task.cancelling(), coro)
    try:
        is_over, result = call.start()
        return result if is_over else await call.drive(result)
    except (SystemExit, KeyboardInterrupt, EnvInterrupt) as error:
        if is_ctrl_c(error):
            raise
        text = guard._measure(monitor, describe_error, error)
        raise EnvError(f"a task of the environment: {text}") from None
