"""Scale: from values to places on a chart, with ticks at round numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, floor, isfinite, log10

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A straight line from [low, high] to [start, end]."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return round(self.start + share * (self.end - self.start), 1)


def round_step(span: float, n_ticks: int) -> float:
    """The round number that cuts the span into about `n_ticks`. `round_step(1.0, 4)` is 0.25."""
    wanted = span / n_ticks
    power = 10.0 ** floor(log10(wanted))
    return next(step * power for step in _STEPS if step * power >= wanted * (1 - 1e-9))


def round_range(values: Iterable[float], *, n_ticks: int = 4) -> tuple[float, float]:
    """From zero, or below where a value is, to the next round number. Of nothing it is 0 to 1."""
    known = [value for value in values if isfinite(value)]
    low, high = min([0.0, *known]), max([0.0, *known])
    if low == high:
        return 0.0, 1.0
    step = round_step(high - low, n_ticks)
    return floor(low / step + 1e-9) * step, ceil(high / step - 1e-9) * step


def ticks(low: float, high: float, *, n_ticks: int = 4, whole: bool = False) -> list[float]:
    """Round numbers from low to high; whole ones for steps."""
    if high <= low:
        return [low]
    step = round_step(high - low, n_ticks)
    step = max(1.0, ceil(step)) if whole else step
    first, last = ceil(low / step - 1e-9), floor(high / step + 1e-9)
    return [n * step for n in range(first, last + 1)]
