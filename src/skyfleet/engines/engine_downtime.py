"""Engine downtime: time that an episode loses to a failing server: failed, retried and unanswered requests.

A time limit that passes because of such a loss says nothing about the policy, so the episode has no
grade. Slow but healthy generation is no loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from time import monotonic

from skyfleet.trajectories.episode_clock import current_clock

UNANSWERED_FACTOR = 3.0
"""A request that takes so many times as long as the longest answered one is unanswered."""
MIN_LOSS_SECONDS = 0.2
"""A request in flight for less says nothing: any server takes that long."""
MIN_BYTES_PER_SECOND = 100_000
"""A body that comes faster is on a slow link, and a slower one drips."""
MAX_PROPORTION = 32.0
"""Of the tokens of two requests: even an answer of one token takes a prefill and a place in a
queue, so it does not say how long a thousand take."""


class AnswerTimes:
    """The longest time in which one server answered, by `max_tokens`."""

    def __init__(self) -> None:
        self._longest: dict[int, tuple[int, float]] = {}
        """By the bit length of `max_tokens`: `max_tokens` and seconds."""

    def record(self, max_tokens: int, seconds: float) -> None:
        size = max_tokens.bit_length()
        if seconds > self._longest.get(size, (0, -1.0))[1]:
            self._longest[size] = (max_tokens, seconds)

    def patience_seconds(self, max_tokens: int, limit_seconds: float = inf) -> float:
        """How long a request may take before it is unanswered and not only slow.

        `limit_seconds` is the episode's: a request is expected to take longer only if an answer did.
        """
        measured = max((seconds for _, seconds in self._longest.values()), default=0.0)
        # A request for more tokens may take longer in proportion.
        expected = max(
            (
                longest * min(MAX_PROPORTION, max(1.0, max_tokens / max(1, answered)))
                for answered, longest in self._longest.values()
            ),
            default=0.0,
        )
        return max(
            MIN_LOSS_SECONDS,
            UNANSWERED_FACTOR * measured,
            min(UNANSWERED_FACTOR * expected, limit_seconds),
        )


def find_limit_seconds() -> float:
    """The time limit of the current episode; infinite without one."""
    clock = current_clock.get()
    return clock.limit_seconds if clock is not None and clock.limit_seconds > 0 else inf


def record_engine_downtime(seconds: float, problem: str = "") -> None:
    """Count lost time on the clock of the current episode, if there is one."""
    clock = current_clock.get()
    if clock is not None and seconds > 0:
        clock.add_engine_downtime(seconds, problem)


@contextmanager
def deferring_expiry(seconds_left: Callable[[], float]) -> Iterator[None]:
    """While the limit of the current episode is over and `seconds_left()` > 0, it goes on inside.

    So it is known whether the engine answers. An answer that comes after the limit is not used.
    """
    clock = current_clock.get()
    if clock is None:
        yield
        return
    previous, clock.defer_expiry = clock.defer_expiry, seconds_left
    try:
        yield
    finally:
        clock.defer_expiry = previous


async def expire_deferred() -> None:
    """End the current episode here if its limit passed while it waited for the engine."""
    clock = current_clock.get()
    if clock is not None:
        await clock.expire_deferred()


class LossMeter:
    """Measures an engine call whose parts may record their own losses."""

    __slots__ = ("_recorded", "_started")

    def __init__(self) -> None:
        self._started, self._recorded = monotonic(), _recorded_seconds()

    def record_failure(self, error: Exception) -> None:
        """The whole call was in vain: record what its parts have not."""
        lost = monotonic() - self._started
        record_engine_downtime(lost - (_recorded_seconds() - self._recorded), str(error))


def _recorded_seconds() -> float:
    clock = current_clock.get()
    return clock.engine_downtime_seconds if clock is not None else 0.0
