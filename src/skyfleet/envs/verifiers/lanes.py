"""Decide which verification runs next, so that slow verifiers never keep others waiting.

A verification starts in the fast lane. One that runs longer than `SOFT_SECONDS` moves to the slow
lane and frees its place; if the slow lane is full, it is stopped and queues there. Within a lane,
verifiers take turns, so one with many episodes does not come before one with few.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from skyfleet.trajectories.episode_clock import current_clock

SOFT_SECONDS = 1.0
"""A verification takes milliseconds; one that takes longer than this may be endless."""
_MIN_SLOW = 8
_MAX_KNOWN = 4096
_POLL_SECONDS = 0.02
_LONG_SECONDS = 1e6
"""Longer than any wait."""


class Lane:
    """A number of places, given in turn to those who wait."""

    def __init__(self, size: int) -> None:
        self._free = size
        self._waiting: OrderedDict[int, deque[asyncio.Future[None]]] = OrderedDict()

    def try_acquire(self) -> bool:
        """Take a place if one is free."""
        if self._free <= 0:
            return False
        self._free -= 1
        return True

    async def acquire(self, key: int) -> None:
        """Wait for a place; those who wait with the same `key` share one turn."""
        if not self._waiting and self.try_acquire():
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.release()
            else:
                self._forget(key, place)
            raise

    def release(self) -> None:
        self._free += 1
        while self._waiting and self._free > 0:
            key, places = self._waiting.popitem(last=False)
            place = places.popleft()
            if places:
                self._waiting[key] = places  # at the end: the next turn is another key's
            if not place.done():
                self._free -= 1
                place.set_result(None)

    def _forget(self, key: int, place: asyncio.Future[None]) -> None:
        places = self._waiting.get(key)
        if places is not None and place in places:
            places.remove(place)
            if not places:
                del self._waiting[key]


def count_slow(n_workers: int) -> int:
    """How many slow verifications may run beside the others."""
    return max(_MIN_SLOW, n_workers // 2)


class Lanes:
    """The two lanes of one event loop."""

    def __init__(self, n_workers: int) -> None:
        self.fast = Lane(n_workers)
        self.slow = Lane(count_slow(n_workers))
        self._known_slow: OrderedDict[int, None] = OrderedDict()

    async def enter(self, key: int) -> Place:
        """Wait for a place; a verifier that was slow the last time queues in the slow lane."""
        lane = self.slow if key in self._known_slow else self.fast
        await lane.acquire(key)
        return Place(self, lane, key)

    def remember(self, key: int, *, slow: bool) -> None:
        self._known_slow.pop(key, None)
        if slow:
            self._known_slow[key] = None
            if len(self._known_slow) > _MAX_KNOWN:
                self._known_slow.popitem(last=False)


class Place:
    """A verification's place in a lane."""

    def __init__(self, lanes: Lanes, lane: Lane, key: int) -> None:
        self._lanes, self._lane, self._key = lanes, lane, key

    @property
    def is_fast(self) -> bool:
        return self._lane is self._lanes.fast

    def move_to_slow(self) -> bool:
        """Free the place in the fast lane; False if the slow lane has none."""
        self._lanes.remember(self._key, slow=True)
        if not self._lanes.slow.try_acquire():
            return False
        self._lane.release()
        self._lane = self._lanes.slow
        return True

    def leave(self) -> None:
        self._lane.release()


class Leases:
    """Bounds the verifications of all event loops together.

    Environments may run in threads, each with an event loop of its own. A lease ends by itself,
    because a thread that an environment blocks for ever cannot give it back.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._ends: dict[object, float] = {}

    async def acquire(self, seconds: float) -> object:
        while True:
            now, lease = monotonic(), object()
            if sum(end > now for end in tuple(self._ends.values())) < self._size:
                self._ends[lease] = now + seconds
                return lease
            await asyncio.sleep(_POLL_SECONDS)

    def release(self, lease: object) -> None:
        self._ends.pop(lease, None)


@contextmanager
def stopped_clock() -> Iterator[None]:
    """Give the episode back the time in here: to wait for a worker is not the verifier's time."""
    clock, loop = current_clock.get(), asyncio.get_running_loop()
    if clock is None:
        yield
        return
    since = loop.time()

    def extend(seconds: float) -> None:
        if clock.loop is loop:
            clock.extend(seconds)
        else:  # an environment in a thread of its own
            clock.loop.call_soon_threadsafe(clock.extend, seconds)

    # Before the wait, because a clock that has expired cannot be extended.
    extend(_LONG_SECONDS)
    try:
        yield
    finally:
        extend(loop.time() - since - _LONG_SECONDS)
