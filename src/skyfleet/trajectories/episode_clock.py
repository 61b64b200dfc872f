"""EpisodeClock: the time limit of one episode, without the time that others cost it.

An engine finds the clock of the episode that it serves in `current_clock` and reports the time that
failed, retried or unanswered requests took. Whoever detects that one environment blocked the event
loop gives that time back to the clocks of the other episodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any

LATE_SECONDS = 0.1
"""A timer that fires later than this was held up by a blocked event loop."""

MATERIAL_LOSS = 0.002
"""A smaller share of the limit decides nothing, such as one retry in an episode of many minutes."""


class EpisodeTimeoutError(TimeoutError):
    """The episode's own time limit expired; a timeout raised inside the episode is another one."""


class EpisodeClock:
    """Raises EpisodeTimeoutError from `async with` when the limit is over; 0 is no limit.

    All methods but the properties belong to the thread of the event loop.
    """

    # Entered twice per episode; a generator-based context manager makes short episodes 3 % slower.
    # So does the object of `asyncio.timeout`, whose rules for cancellation these are.
    __slots__ = (
        "_extended",
        "_has_cancelled",
        "_is_deferred",
        "_loop",
        "_n_cancels",
        "_previous",
        "_started",
        "_stopped",
        "_task",
        "_timer",
        "defer_expiry",
        "engine_downtime_seconds",
        "engine_problem",
        "limit_seconds",
    )

    def __init__(self, limit_seconds: float) -> None:
        self.limit_seconds = limit_seconds
        self.engine_downtime_seconds = 0.0
        """Time that failed, retried or unanswered engine requests took."""
        self.engine_problem = ""
        """Why the last of them failed."""
        self.defer_expiry: Callable[[], float] | None = None
        """Called when the limit is over, with an engine request in flight: in how many seconds to
        ask again whether the engine answers it, 0 to expire now."""
        self._is_deferred = False
        self._extended = self._started = 0.0
        self._stopped: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._has_cancelled = False

    async def __aenter__(self) -> EpisodeClock:
        task = asyncio.current_task()
        assert task is not None
        self._loop, self._task, self._n_cancels = task.get_loop(), task, task.cancelling()
        self._started, self._stopped = self._loop.time(), None
        self._schedule()
        _running.add(self)
        self._previous: Token[EpisodeClock | None] = current_clock.set(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        current_clock.reset(self._previous)
        _running.discard(self)
        self._stopped = self._loop.time()
        if self._timer is not None:
            self._timer.cancel()
        if not self._has_cancelled:
            return
        self._has_cancelled = False
        if self._task.uncancel() <= self._n_cancels and kind is asyncio.CancelledError:
            raise EpisodeTimeoutError(
                f"not finished after {self.limit_seconds:g} s "
                "(generator.trajectory_timeout_seconds)"
            ) from None

    def count_cancels(self, task: asyncio.Task[Any] | None) -> int:
        """How many cancellations of `task` are this clock's."""
        return int(self._has_cancelled and self._task is task)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that the clock belongs to, once it has started."""
        return self._loop

    @property
    def elapsed_seconds(self) -> float:
        """Time since the start, without what was given back."""
        now = self._loop.time() if self._stopped is None else self._stopped
        return now - self._started - self._extended

    @property
    def has_expired(self) -> bool:
        return 0 < self.limit_seconds <= self.elapsed_seconds

    @property
    def would_have_finished(self) -> bool:
        """Whether the limit might not have expired without the time that the engine lost.

        True after EpisodeTimeoutError: the episode says nothing about the policy, so it has no grade.
        """
        # Not by elapsed_seconds: it goes on while a cancelled call ends.
        lost = self.engine_downtime_seconds
        return lost > 0 and lost >= MATERIAL_LOSS * self.limit_seconds

    def add_engine_downtime(self, seconds: float, problem: str = "") -> None:
        """Count time in which the engine had failed or did not answer; the limit stays."""
        self.engine_downtime_seconds += seconds
        self.engine_problem = problem or self.engine_problem

    def extend(self, seconds: float) -> None:
        """Give back time that passed while another environment blocked the event loop."""
        self._extended += seconds
        if self._timer is not None and not self._timer.cancelled():
            self._timer.cancel()
            self._schedule()

    def _schedule(self) -> None:
        if self.limit_seconds > 0:
            deadline = self._started + self.limit_seconds + self._extended
            self._timer = self._loop.call_at(deadline, self._expire)

    def _expire(self, *, is_late: bool = False) -> None:
        timer = self._timer
        late = timer is not None and self._loop.time() - timer.when() > LATE_SECONDS
        if late and not is_late:
            # The event loop was blocked: whoever measures that extends this clock first.
            self._loop.call_soon(lambda: self._expire(is_late=True))
        elif self._stopped is None and not self._has_cancelled and self.has_expired:
            seconds = self.defer_expiry() if self.defer_expiry is not None else 0.0
            self._is_deferred = seconds > 0
            if self._is_deferred:
                self._timer = self._loop.call_later(seconds, self._expire)
            else:
                self._cancel()

    def _cancel(self) -> None:
        self._has_cancelled = True
        self._task.cancel()

    async def expire_deferred(self) -> None:
        """If the expiry was deferred, wait for the cancellation: what came after it is not used."""
        # Not has_expired alone: time that a blocked event loop took may still be given back.
        if self._is_deferred and not self._has_cancelled and self.has_expired:
            self._cancel()
            await asyncio.sleep(1)


current_clock: ContextVar[EpisodeClock | None] = ContextVar("current_clock", default=None)
"""The clock of the episode that the running task belongs to."""

_running: set[EpisodeClock] = set()


def running_clocks() -> Iterator[EpisodeClock]:
    """The clocks of all episodes that run in the current event loop."""
    loop = asyncio.get_running_loop()
    return (clock for clock in tuple(_running) if clock._loop is loop)
