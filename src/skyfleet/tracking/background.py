"""BackgroundQueue: hands items to a thread; a slow or failing receiver never delays its caller.

BackgroundTracker: the same for the calls of a tracker's client.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from threading import Condition, Thread
from time import monotonic
from typing import Generic, Literal, TypeVar

from skyfleet.redaction import redact

logger = logging.getLogger(__name__)

DRAIN_SECONDS = 30.0
"""For the rows and files that a tracker has not sent at the end of a run."""

MAX_CALLS = 2048
"""Rows that wait for a tracker; one has some 20 KB."""

RunState = Literal["finished", "failed", "killed"]
"""How a run ended: by itself, by an error, or by a signal."""

T = TypeVar("T")
Pause = Callable[[float], bool]
"""Waits so many seconds; False, at once, if the run ends before that and its deadline with it."""


class BackgroundQueue(Generic[T]):
    """Items are handled in order, one at a time; what does not fit into the queue is dropped.

    `handle` gets an item and a `Pause` for its retries. An exception drops the item.
    """

    def __init__(
        self,
        name: str,
        handle: Callable[[T, Pause], object],
        *,
        max_items: int = 256,
        drain_seconds: float = 15.0,
    ) -> None:
        self._name, self._handle = name, handle
        self._max_items, self._drain_seconds = max_items, drain_seconds
        self._items: deque[T] = deque()
        self._changed = Condition()
        self._deadline: float | None = None
        """Set when the run ends."""
        self._reported: set[str] = set()
        self._is_closed = False
        self.n_dropped = 0
        self._thread: Thread | None = None
        """Started with the first item."""

    def put(self, item: T) -> None:
        with self._changed:
            if self._deadline is None and len(self._items) < self._max_items:
                self._items.append(item)
                self._changed.notify_all()
                self._start()
                return
        self._drop("full", f"{self._max_items} are waiting already")

    def finish(self) -> None:
        """Take no further items; `close` waits for those that are left."""
        with self._changed:
            if self._deadline is None:
                self._deadline = monotonic() + self._drain_seconds
                self._changed.notify_all()

    def close(self) -> None:
        """Handle what is left, for `drain_seconds` at most."""
        self.finish()
        assert self._deadline is not None
        if self._thread is None:
            return
        self._thread.join(max(0.0, self._deadline - monotonic()))
        with self._changed:
            n_left = len(self._items)
            self._items.clear()
        if n_left or self._thread.is_alive():
            self._drop("deadline", f"the {self._drain_seconds:g} s at the end of the run are over")
        self._is_closed = True

    def _start(self) -> None:
        if self._thread is None:
            self._thread = Thread(target=self._run, name=f"skyfleet-{self._name}", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (item := self._take()) is not None:
            try:
                self._handle(item, self._pause)
            except Exception as error:
                self._drop(type(error).__name__, str(error) or type(error).__name__)

    def _take(self) -> T | None:
        with self._changed:
            while not self._items and self._deadline is None:
                self._changed.wait()
            return self._items.popleft() if self._items else None

    def _pause(self, seconds: float) -> bool:
        end = monotonic() + seconds
        with self._changed:
            while (left := end - monotonic()) > 0:
                if self._deadline is not None and end > self._deadline:
                    return False
                self._changed.wait(left)  # ends early when the deadline is set
        return True

    def _drop(self, kind: str, reason: str) -> None:
        self.n_dropped += 1
        # An outage of a day is one line; what a thread that was left behind meets is none.
        if kind not in self._reported and not self._is_closed:
            self._reported.add(kind)
            logger.warning(
                "%s: not sent: %s; the run goes on, further cases are not reported",
                self._name,
                redact(reason),
            )


class BackgroundTracker:
    """A tracker whose client is called in a thread of its own, one call at a time and in order."""

    def __init__(self, name: str, *, end_run: Callable[[RunState], object]) -> None:
        """`end_run` ends the client's run, after all other calls."""
        self._end_run: Callable[[RunState], object] | None = end_run
        self._queue = BackgroundQueue[Callable[[], object]](
            name, lambda call, _: call(), max_items=MAX_CALLS, drain_seconds=DRAIN_SECONDS
        )

    def call(self, call: Callable[[], object]) -> None:
        self._queue.put(call)

    def sync(self) -> None:
        """The client stores its rows itself."""

    def finish(self, state: RunState = "finished") -> None:
        """Start to end the client's run; `close` waits for it."""
        if (end_run := self._end_run) is not None:
            self._queue.put(lambda: end_run(state))
            self._end_run = None
            self._queue.finish()

    def close(self) -> None:
        """Wait for the calls that are left, for DRAIN_SECONDS at most."""
        self.finish()
        self._queue.close()
