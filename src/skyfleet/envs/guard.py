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
from types import CoroutineType, TracebackType, coroutine
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
        "_is_entered",
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
        self._is_entered = False

    def __enter__(self) -> EnvGuard:
        self._monitor = monitor = find_monitor()
        self.task, self._is_entered = asyncio.current_task(), True
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
        self._monitor, self.task, self._is_entered = None, None, False

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
        self.during, self.clock, self.own_cancels = during, current_clock.get(), 0
        if not self._is_entered:  # its calls may come from several tasks
            self.task, self._monitor = asyncio.current_task(), find_monitor()
        task, monitor = self.task, self._monitor
        assert task is not None
        assert monitor is not None
        previous, n_cancels = current_guard.set(self), task.cancelling()
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
                    self.give_back(held)
                self.own_cancels += max(0, task.cancelling() - n_cancels)
            if not is_over:
                result = await _Call(self, task, n_cancels, inner).drive(result)
            elif self.own_cancels:
                await _Call(self, task, n_cancels, inner).settle()
            return result if convert is None else convert(result)
        except EpisodeError:
            raise
        except BaseException as error:
            if isinstance(error, CancelledError) and task.cancelling() > n_cancels:
                await _Call(self, task, n_cancels, inner).settle()
                raise
            if self.is_closing or _is_ctrl_c(error):
                raise
            raise self._wrap(error, kind) from error
        finally:
            current_guard.reset(previous)

    def _wrap(self, error: BaseException, kind: type[EpisodeError]) -> EpisodeError:
        if isinstance(error, EnvInterrupt):
            return EnvError(
                f"{self.during}: held its thread beyond the limit of {self.limit_seconds:g} s "
                "(generator.trajectory_timeout_seconds) and was interrupted; await what takes long, "
                "or set environment.isolation=thread"
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

    def give_back(self, seconds: float) -> None:
        """Its environment held the event loop: the other episodes get that time back."""
        monitor = self._monitor or find_monitor()
        give_back(seconds, except_for=[current_clock.get()])
        if (stall := monitor.explain_stall(seconds)) is not None:
            self.report_stall(seconds, stall.line, holds_interpreter=stall.holds_interpreter)

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
    """One call, driven step by step."""

    __slots__ = (
        "_gives_up",
        "_guard",
        "_inner",
        "_monitor",
        "_n_cancels",
        "_task",
        "_timer",
        "cancelled",
    )

    def __init__(
        self, guard: EnvGuard, task: asyncio.Task[Any], n_cancels: int, inner: Any
    ) -> None:
        self._guard, self._task = guard, task
        self._monitor = guard._monitor or find_monitor()
        self._n_cancels, self._inner = n_cancels, inner
        self.cancelled: CancelledError | None = None
        """The first cancellation that the environment has not answered by ending."""
        self._timer: asyncio.TimerHandle | None = None
        self._gives_up = False

    def start(self) -> tuple[bool, Any]:
        return self._run(partial(self._inner.send, None))

    @coroutine
    def drive(self, awaited: Any) -> Generator[Any, None, Any]:
        """Go on after the first wait until the call has ended."""
        inner = self._inner
        if inner is None:
            raise EnvError(f"{self._guard.during}: StopIteration: it is no async function")
        resume: Callable[[], Any]
        try:
            while True:
                resume = partial(inner.send, None)
                try:
                    yield from self._wait(awaited)
                except CancelledError as error:
                    if self._gives_up:
                        self._task.uncancel()
                        self._abandon()
                        raise (self.cancelled or error) from None
                    self._expect_end(error)
                    resume = partial(inner.throw, error)
                except BaseException as error:
                    self._guard.is_closing = isinstance(error, GeneratorExit)
                    resume = partial(inner.throw, error)
                is_over, awaited = self._run(resume)
                if is_over:
                    yield from self.settle()
                    if self.cancelled is not None:
                        raise self.cancelled
                    return awaited
        except CancelledError:
            yield from self.settle()
            raise
        finally:
            self._end()

    def _run(self, resume: Callable[[], Any]) -> tuple[bool, Any]:
        """Run the environment until it waits or ends: (ended, result or what it waits for)."""
        monitor, guard = self._monitor, self._guard
        episode = guard.task or self._task
        n_cancels = episode.cancelling()
        since = monitor.start(guard)
        try:
            return False, resume()
        except StopIteration as stop:
            return True, stop.value
        finally:
            held = monitor.stop() - since
            if held > STALL_SECONDS:
                guard.give_back(held)
            if episode.cancelling() > n_cancels:
                guard.own_cancels += episode.cancelling() - n_cancels
            if self.cancelled is not None:
                self._forget_own_timeout()

    def _forget_own_timeout(self) -> None:
        """A time limit inside the environment cancels the task too, and undoes that itself."""
        is_undone = self._task.cancelling() <= self._n_cancels
        clock = current_clock.get()
        if is_undone and not (clock is not None and clock.has_expired):
            self.cancelled = None
            self._end()

    def _wait(self, awaited: Any) -> Generator[Any, None, None]:
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
            self._expect_end(error)
            yield from _stand_in(awaited)

    @property
    def _is_cancelled_by_itself(self) -> bool:
        """Whether only the environment has cancelled the task of its episode, and has not undone it.

        Cancel scopes of anyio do both.
        """
        more = self._task.cancelling() - self._n_cancels
        return self._task is self._guard.task and 0 < more <= self._guard.own_cancels

    @coroutine
    def settle(self) -> Generator[Any, None, None]:
        """Undo a cancellation of the environment's own, which would look like that of the run."""
        if not self._is_cancelled_by_itself:
            return
        while self._is_cancelled_by_itself:
            self._task.uncancel()
        with suppress(CancelledError):
            yield  # a request that is still pending in the task arrives here
        if self._task.cancelling() > self._n_cancels:
            raise CancelledError
        raise EnvError(f"{self._guard.during}: it cancelled the task that runs its episode")

    def _expect_end(self, error: CancelledError) -> None:
        """Give the call its grace period from the first cancellation on."""
        self.cancelled = self.cancelled or error
        if self._timer is None:
            loop = self._monitor.loop
            self._timer = loop.call_later(self._guard.cancel_grace_seconds, self._wake)

    def _wake(self) -> None:
        self._gives_up = True
        self._task.cancel()

    def _abandon(self) -> None:
        guard, inner = self._guard, self._inner
        guard.abandoned = True
        chain = list(_await_chain(inner))
        for one in reversed(chain):
            with suppress(BaseException):
                self._run(one.close)
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

    def _end(self) -> None:
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


def _is_ctrl_c(error: BaseException) -> bool:
    return isinstance(error, KeyboardInterrupt) and not raised_by_code(error)


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
    task = asyncio.current_task()
    assert task is not None
    call = _Call(guard, task, task.cancelling(), coro)
    try:
        is_over, result = call.start()
        return result if is_over else await call.drive(result)
    except (SystemExit, KeyboardInterrupt, EnvInterrupt) as error:
        if _is_ctrl_c(error):
            raise
        raise EnvError(f"a task of the environment: {describe_error(error)}") from None
