"""Time that an episode loses to a failing server: failed, retried and unanswered requests.

A time limit that passes because of such a loss says nothing about the policy, so the episode has no
grade. Slow but healthy generation is no loss.
"""

from __future__ import annotations

from time import monotonic

from skyfleet.trajectories.episode_clock import current_clock

UNANSWERED_FACTOR = 3.0
"""A request that takes so many times as long as the longest answered one is unanswered."""
MIN_LOSS_SECONDS = 0.2
"""A request in flight for less says nothing: any server takes that long."""


class AnswerTimes:
    """The longest time in which one server answered, by `max_tokens`."""

    def __init__(self) -> None:
        self._longest: dict[int, tuple[int, float]] = {}
        """By the bit length of `max_tokens`: `max_tokens` and seconds."""

    def record(self, max_tokens: int, seconds: float) -> None:
        size = max_tokens.bit_length()
        if seconds > self._longest.get(size, (0, -1.0))[1]:
            self._longest[size] = (max_tokens, seconds)

    def is_unanswered(self, max_tokens: int, seconds: float) -> bool:
        """Whether a request that is in flight for so long is more than a slow one."""
        if seconds < MIN_LOSS_SECONDS:
            return False
        # A request for more tokens may take longer in proportion.
        healthy = [
            longest * max(1.0, max_tokens / max(1, answered))
            for answered, longest in self._longest.values()
        ]
        return not healthy or seconds > UNANSWERED_FACTOR * max(healthy)


def record_engine_loss(seconds: float, problem: str = "") -> None:
    """Count lost time on the clock of the current episode, if there is one."""
    clock = current_clock.get()
    if clock is not None and seconds > 0:
        clock.add_engine_loss(seconds, problem)


class LossMeter:
    """Measures an engine call whose parts may record their own losses."""

    __slots__ = ("_recorded", "_started")

    def __init__(self) -> None:
        self._started, self._recorded = monotonic(), _recorded_seconds()

    def record_failure(self, error: Exception) -> None:
        """The whole call was in vain: record what its parts have not."""
        lost = monotonic() - self._started
        record_engine_loss(lost - (_recorded_seconds() - self._recorded), str(error))


def _recorded_seconds() -> float:
    clock = current_clock.get()
    return clock.engine_loss_seconds if clock is not None else 0.0
