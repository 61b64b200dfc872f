"""GuardedCall: drive one call of an environment step by step, and abandon it if it does not end."""

from __future__ import annotations

import asyncio
import ctypes
import dis
import inspect
import logging
from asyncio import CancelledError, Future
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from functools import partial
from inspect import CORO_CLOSED
from types import coroutine
from typing import Any, Protocol

from skyfleet.envs.stalls import STALL_SECONDS, Holder, LoopMonitor
from skyfleet.errors import EnvError
from skyfleet.trajectories.episode_clock import current_clock

logger = logging.getLogger(__name__)

MAX_ABANDONED = 32
"""Calls of one environment that were abandoned and still run; then it is not opened again."""
_RAISE = dis.opmap["RAISE_VARARGS"]
_RUNNERS = asyncio.runners.__file__


class AbandonedCalls:
    """The calls of each environment that were given up and still run."""

    def __init__(self) -> None:
        self._is_alive: dict[tuple[str, int], list[Callable[[], bool]]] = {}

    def add(self, key: tuple[str, int], is_alive: Callable[[], bool]) -> None:
        """`key` is an environment's and that of what opens it: another may have the same name."""
        self._is_alive.setdefault(key, []).append(is_alive)

    def count(self, key: tuple[str, int]) -> int:
        if key not in self._is_alive:
            return 0
        if alive := [is_alive for is_alive in self._is_alive[key] if is_alive()]:
            self._is_alive[key] = alive
        else:
            del self._is_alive[key]
        return len(alive)


abandoned_calls = AbandonedCalls()


class CallGuard(Holder, Protocol):
    """The guard of the episode that a call belongs to."""

    calls_key: tuple[str, int]
    task: asyncio.Task[Any] | None
    own_cancels: int
    abandoned: bool
    is_closing: bool
    cancel_grace_seconds: float

    def give_back(self, seconds: float, monitor: LoopMonitor) -> None: ...

    def count_own_cancels(self, task: asyncio.Task[Any], n_cancels: int) -> int: ...

    def is_cancelled(self, task: asyncio.Task[Any], n_cancels: int) -> bool: ...


class GuardedCall:
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
        self,
        guard: CallGuard,
        monitor: LoopMonitor,
        task: asyncio.Task[Any],
        n_cancels: int,
        inner: Any,
    ) -> None:
        self._guard, self._monitor, self._task = guard, monitor, task
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
                    self._end()
                    yield from self.settle()
                    if self.cancelled is not None:
                        raise self.cancelled
                    return awaited
        except CancelledError:
            self._end()
            yield from self.settle()
            raise
        finally:
            self._end()

    def _run(self, resume: Callable[[], Any]) -> tuple[bool, Any]:
        """Run the environment until it waits or ends: (ended, result or what it waits for)."""
        monitor, guard = self._monitor, self._guard
        # Its own cancellations of the episode, seen from the tasks that it started as well; a task
        # of another event loop may change at any time.
        episode = guard.task
        if episode is None or episode.get_loop() is not monitor.loop:
            episode = self._task
        n_cancels = episode.cancelling()
        since = monitor.start(guard)
        try:
            return False, resume()
        except StopIteration as stop:
            return True, stop.value
        finally:
            held = monitor.stop() - since
            if held > STALL_SECONDS:
                guard.give_back(held, monitor)
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
            if self._gives_up or not awaited.cancel():
                raise
            self._expect_end(error)
            yield from _stand_in(awaited)

    @coroutine
    def settle(self) -> Generator[Any, None, None]:
        """Undo cancellations of the environment's own, which would look like those of the run.

        They are undone in any case; then a cancellation by the run or the clock goes on as one, and
        without any the environment has failed.
        """
        guard, task = self._guard, self._task
        if task is not guard.task or not (n := guard.count_own_cancels(task, self._n_cancels)):
            return
        for _ in range(n):
            task.uncancel()
        with suppress(CancelledError):
            yield  # a request that is still pending in the task arrives here
        if guard.is_cancelled(task, self._n_cancels):
            raise CancelledError
        raise EnvError(
            f"{guard.during}: it cancelled the task that runs its episode; exit a task group or a "
            "time limit in the call that entered it"
        )

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
        # One that ignores even GeneratorExit is never collected, not even by the interpreter that
        # exits: that would resume it, without an event loop, and it may try again without end.
        if alive := [one for one in chain if inspect.getcoroutinestate(one) != CORO_CLOSED]:
            for one in alive:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
            abandoned_calls.add(guard.calls_key, lambda: bool(alive))
        logger.warning(
            "environment %s ignored its cancellation for %g s in %s (task %s); the call was "
            "abandoned, and %d of its calls still run",
            guard.env_key,
            guard.cancel_grace_seconds,
            guard.during,
            guard.task_key,
            abandoned_calls.count(guard.calls_key),
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


def is_ctrl_c(error: BaseException) -> bool:
    return isinstance(error, KeyboardInterrupt) and not raised_by_code(error)


def raised_by_code(error: KeyboardInterrupt) -> bool:
    """Whether a `raise` statement raised it, and not the user's Ctrl-C at that point."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None or traceback.tb_frame.f_code.co_filename == _RUNNERS:
        return False
    return traceback.tb_frame.f_code.co_code[traceback.tb_lasti] == _RAISE
