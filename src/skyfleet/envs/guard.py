"""EnvGuard: make the calls of one episode's environment so that they can hurt only that episode.

The guard drives the environment's coroutine itself, step by step, inside the episode's task. So it
sees every exception before the event loop does, measures how long the environment holds the loop,
and can abandon a call that ignores its cancellation. A call that never waits costs no task switch.
"""

from __future__ import annotations

import asyncio
import dis
import inspect
import logging
from asyncio import CancelledError, Future
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from inspect import CORO_CLOSED
from time import perf_counter
from types import TracebackType, coroutine
from typing import Any, Literal

from skyfleet.envs.stalls import (
    STALL_SECONDS,
    EnvInterrupt,
    LoopMonitor,
    find_monitor,
    give_back,
    unwatch,
    watch,
)
from skyfleet.envs.values import describe_error, format_value
from skyfleet.errors import EnvError, EpisodeError
from skyfleet.trajectories.episode_clock import EpisodeClock, current_clock

logger = logging.getLogger(__name__)

MAX_ABANDONED = 32
"""Calls of one environment that were abandoned and still run; then it is not opened again."""
_RAISE = dis.opmap["RAISE_VARARGS"]
_RUNNERS = asyncio.runners.__file__


Mode = Literal["auto", "none", "thread", "process"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """Where a user's environment runs; `envs/isolation.py` reads it."""

    mode: Mode = "auto"
    worker_memory_gb: float = 8
    """Address space of a worker process."""
    max_observation_chars: int = 0
    """A worker cuts longer observations before it sends them; 0 cuts nothing."""


class AbandonedCalls:
    """The calls of each environment that were given up and still run."""

    def __init__(self) -> None:
        self._is_alive: dict[str, list[Callable[[], bool]]] = {}

    def add(self, env_key: str, is_alive: Callable[[], bool]) -> None:
        self._is_alive.setdefault(env_key, []).append(is_alive)

    def count(self, env_key: str) -> int:
        if env_key not in self._is_alive:
            return 0
        alive = [is_alive for is_alive in self._is_alive[env_key] if is_alive()]
        self._is_alive[env_key] = alive
        return len(alive)


abandoned_calls = AbandonedCalls()
_warned: set[tuple[str, str]] = set()


class EnvGuard:
    """Calls the environment of one episode."""

    __slots__ = (
        "__weakref__",
        "_monitor",
        "abandoned",
        "cancel_grace_seconds",
        "clock",
        "during",
        "env_key",
        "is_closing",
        "is_isolated",
        "isolation",
        "limit_seconds",
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
        self.isolation = isolation
        """How the environment's factory may isolate it; None: not at all."""
        self.is_isolated = is_isolated
        """Whether its event loop runs no other environment."""
        self.during = "opening"
        self.clock: EpisodeClock | None = None
        self.task: asyncio.Task[Any] | None = None
        self.own_cancels = 0
        """How often the environment cancelled the task of its own episode."""
        self.abandoned = self.is_closing = False
        self.on_stall: Callable[[float, bool], None] | None = None
        """Set by the factory that opened the environment; called if it blocks."""
        self._monitor: LoopMonitor | None = None

    def __enter__(self) -> EnvGuard:
        self._monitor = monitor = find_monitor()
        install_task_factory(monitor.loop)
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
        self._monitor = None

    @property
    def holds_loop(self) -> bool:
        """Whether its environment runs now, seen from another thread."""
        return self._monitor is not None and self._monitor.running is self

    def has_expired(self, held_seconds: float) -> bool:
        """Whether a call that has held a thread for so long is beyond the episode's limit."""
        if self.clock is not None and self.clock.has_expired:
            return True
        return 0 < self.limit_seconds < held_seconds

    async def call(
        self, kind: type[EpisodeError], during: str, function: Callable[..., Any], *args: Any
    ) -> Any:
        """Await `function(*args)`; whatever it raises becomes an EpisodeError, by default `kind`.

        Only the cancellation of the episode and the user's Ctrl-C pass through.
        """
        self.during, self.clock = during, current_clock.get()
        self.task = task = asyncio.current_task()
        self.own_cancels = 0
        assert task is not None
        previous, n_cancels = current_guard.set(self), task.cancelling()
        try:
            return await self.drive(function, *args)
        except EpisodeError:
            raise
        except CancelledError:
            if task.cancelling() > n_cancels:
                raise
            raise kind(f"{during}: CancelledError: it cancelled a task that it waits for") from None
        except EnvInterrupt:
            raise EnvError(
                f"{during}: held its thread beyond the limit of {self.limit_seconds:g} s "
                "(generator.trajectory_timeout_seconds) and was interrupted; await what takes long, "
                "or set environment.isolation=thread"
            ) from None
        except BaseException as error:
            if self.is_closing or (
                isinstance(error, KeyboardInterrupt) and not raised_by_code(error)
            ):
                raise
            raise kind(f"{during}: {describe_error(error)}") from error
        finally:
            current_guard.reset(previous)

    @coroutine
    def drive(self, function: Callable[..., Any], *args: Any) -> Generator[Any, None, Any]:
        """Await `function(*args)` step by step."""
        call = _Call(self)
        try:
            _, inner = call.run(partial(self._start, function, args))
            resume: Callable[[], Any] = partial(inner.send, None)
            while True:
                is_over, result = call.run(resume)
                if is_over:
                    if call.is_cancelled_by_itself:
                        yield from call.undo_own_cancels()
                    if call.cancelled is not None:
                        raise call.cancelled
                    return result
                resume = partial(inner.send, None)
                try:
                    yield from call.wait(result)
                except CancelledError as error:
                    if call.gives_up():
                        call.abandon(inner)
                        raise (call.cancelled or error) from None
                    call.expect_end(error)
                    resume = partial(inner.throw, error)
                except BaseException as error:
                    self.is_closing = isinstance(error, GeneratorExit)
                    resume = partial(inner.throw, error)
        except CancelledError:
            if call.is_cancelled_by_itself:
                yield from call.undo_own_cancels()
            raise
        finally:
            call.end()

    def _start(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        try:
            awaitable = function(*args)
        except StopIteration as error:
            raise EnvError(f"{self.during}: {describe_error(error)}") from None
        if inspect.iscoroutine(awaitable):
            return awaitable
        if not inspect.isawaitable(awaitable):
            raise EnvError(
                f"{self.during} returned {format_value(awaitable)}, which cannot be awaited; "
                "write async def"
            )
        return _await(awaitable)

    def report_stall(self, seconds: float, line: str, *, holds_interpreter: bool = False) -> None:
        """Name the environment, once, and start its later episodes elsewhere."""
        if self.is_isolated:
            return
        if self.on_stall is not None:
            self.on_stall(seconds, holds_interpreter)
        if (self.env_key, self.during) in _warned:
            return
        _warned.add((self.env_key, self.during))
        where = f" at {line}" if line else ""
        what = "the interpreter lock" if holds_interpreter else "the event loop"
        logger.warning(
            "environment %s held %s for %.1f s in %s%s (task %s); the other episodes get the time "
            "back. Await what takes long, or set environment.isolation to %s",
            self.env_key,
            what,
            seconds,
            self.during,
            where,
            self.task_key,
            "process" if holds_interpreter else "thread",
        )


class _Call:
    """The state of one driven call."""

    __slots__ = (
        "_clock",
        "_gives_up",
        "_guard",
        "_monitor",
        "_n_cancels",
        "_task",
        "_timer",
        "cancelled",
    )

    def __init__(self, guard: EnvGuard) -> None:
        task = asyncio.current_task()
        assert task is not None
        if guard._monitor is None:
            guard._monitor = find_monitor()
        self._guard, self._task, self._monitor = guard, task, guard._monitor
        self._clock = current_clock.get()
        self._n_cancels = task.cancelling()
        self.cancelled: CancelledError | None = None
        """The first cancellation that the environment has not answered by ending."""
        self._timer: asyncio.TimerHandle | None = None
        self._gives_up = False

    def run(self, resume: Callable[[], Any]) -> tuple[bool, Any]:
        """Run the environment until it waits or ends: (ended, result or what it waits for)."""
        guard, episode = self._guard, self._guard.task
        n_cancels = episode.cancelling() if episode is not None else 0
        since = self._monitor.start(guard)
        try:
            return False, resume()
        except StopIteration as stop:
            return True, stop.value
        finally:
            self._monitor.stop()
            if (held := perf_counter() - since) > STALL_SECONDS:
                self._give_back(held)
            if episode is not None and (more := episode.cancelling() - n_cancels) > 0:
                guard.own_cancels += more
            if self.cancelled is not None:
                self._forget_own_timeout()

    def _forget_own_timeout(self) -> None:
        """A time limit inside the environment cancels the task too, and undoes that itself."""
        is_undone = self._task.cancelling() <= self._n_cancels
        if is_undone and not (self._clock is not None and self._clock.has_expired):
            self.cancelled = None
            self.end()

    def _give_back(self, seconds: float) -> None:
        line, self._monitor.line = self._monitor.line, ""
        give_back(seconds, except_for=[self._clock])
        self._guard.report_stall(seconds, line)

    def wait(self, awaited: Any) -> Generator[Any, None, None]:
        """Wait for what the environment waits for.

        A task or a gathering ends its cancellation when it likes; the grace period covers that too.
        """
        if type(awaited) is Future or not isinstance(awaited, Future):
            yield awaited
            return
        awaited._asyncio_future_blocking = False
        try:
            yield from _stand_in(awaited)
        except CancelledError as error:
            if not awaited.cancel():
                raise
            self.expect_end(error)
            yield from _stand_in(awaited)

    @property
    def is_cancelled_by_itself(self) -> bool:
        """Whether only the environment has cancelled the task of its episode, and has not undone it.

        Cancel scopes of anyio do both.
        """
        more = self._task.cancelling() - self._n_cancels
        return self._task is self._guard.task and 0 < more <= self._guard.own_cancels

    def undo_own_cancels(self) -> Generator[Any, None, None]:
        """Otherwise the end of the call would look like the cancellation of the run."""
        while self.is_cancelled_by_itself:
            self._task.uncancel()
        with suppress(CancelledError):
            yield  # a request that is still pending in the task arrives here
        if self._task.cancelling() > self._n_cancels:
            raise CancelledError
        raise EnvError(f"{self._guard.during}: it cancelled the task that runs its episode")

    def expect_end(self, error: CancelledError) -> None:
        """Give the call its grace period from the first cancellation on."""
        self.cancelled = self.cancelled or error
        if self._timer is None:
            loop = self._monitor.loop
            self._timer = loop.call_later(self._guard.cancel_grace_seconds, self._wake)

    def _wake(self) -> None:
        self._gives_up = True
        self._task.cancel()

    def gives_up(self) -> bool:
        if self._gives_up:
            self._task.uncancel()
        return self._gives_up

    def abandon(self, inner: Coroutine[Any, Any, Any]) -> None:
        guard = self._guard
        guard.abandoned = True
        chain = list(_await_chain(inner))
        for one in reversed(chain):
            with suppress(BaseException):
                self.run(one.close)
        # One that ignores even GeneratorExit is kept: collecting it would resume it.
        if alive := [one for one in chain if inspect.getcoroutinestate(one) != CORO_CLOSED]:
            abandoned_calls.add(guard.env_key, lambda: bool(alive))
        logger.warning(
            "environment %s ignored its cancellation for %g s in %s (task %s); the call was "
            "abandoned, and %d of its calls still run",
            guard.env_key,
            guard.cancel_grace_seconds,
            guard.during,
            guard.task_key,
            abandoned_calls.count(guard.env_key),
        )

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _await_chain(awaited: Any) -> Iterator[Any]:
    """The coroutine and those it waits for, from the outermost to the innermost."""
    while inspect.iscoroutine(awaited):
        yield awaited
        awaited = awaited.cr_await


def _stand_in(awaited: Future[Any]) -> Generator[Any, None, None]:
    """Wait until `awaited` is done; a cancellation ends the wait at once."""
    if awaited.done():
        return
    waiter = awaited.get_loop().create_future()

    def wake(_: object) -> None:
        if not waiter.done():
            waiter.set_result(None)

    awaited.add_done_callback(wake)
    yield from waiter


async def _await(awaitable: Any) -> Any:
    return await awaitable


def raised_by_code(error: KeyboardInterrupt) -> bool:
    """Whether a `raise` statement raised it, and not the user's Ctrl-C at that point."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None or traceback.tb_frame.f_code.co_filename == _RUNNERS:
        return False
    return traceback.tb_frame.f_code.co_code[traceback.tb_lasti] == _RAISE


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
            task.add_done_callback(lambda _: coro.close())
        return task

    create.guards_environments = True  # type: ignore[attr-defined]
    loop.set_task_factory(create)


async def _run_inner(guard: EnvGuard, coro: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await guard.drive(lambda: coro)
    except (SystemExit, KeyboardInterrupt, EnvInterrupt) as error:
        if isinstance(error, KeyboardInterrupt) and not raised_by_code(error):
            raise
        raise EnvError(f"a task of the environment: {describe_error(error)}") from None
