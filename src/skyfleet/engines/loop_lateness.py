"""LoopLateness: time in which an event loop was too busy to read what a server had sent."""

from __future__ import annotations

import asyncio
from time import monotonic
from types import TracebackType
from weakref import WeakKeyDictionary

TICK_SECONDS = 0.02
SLACK_SECONDS = 0.005
"""A timer of a loop that has nothing else to do is late by less."""


class LoopLateness:
    """Measures one event loop with a timer that runs while anyone is inside `with`."""

    def __init__(self) -> None:
        self._n_users = 0
        self._late_seconds = self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        self._n_users += 1
        if self._n_users == 1:
            self._schedule()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._n_users -= 1
        if not self._n_users and self._timer is not None:
            self._timer.cancel()
            self._late_seconds, self._timer = self._late_seconds + self._overdue_seconds(), None

    def now(self) -> float:
        """A monotonic time that stands still while the loop is late."""
        return monotonic() - self._late_seconds - self._overdue_seconds()

    def _overdue_seconds(self) -> float:
        """Since the timer was due: what is read after a stall is read before the timer runs."""
        if self._timer is None:
            return 0.0
        return max(0.0, monotonic() - self._due - SLACK_SECONDS)

    def _schedule(self) -> None:
        self._due = monotonic() + TICK_SECONDS
        self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)

    def _tick(self) -> None:
        self._late_seconds += self._overdue_seconds()
        self._schedule()


_by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopLateness] = WeakKeyDictionary()


def loop_lateness() -> LoopLateness:
    """Of the running loop."""
    return _by_loop.setdefault(asyncio.get_running_loop(), LoopLateness())
