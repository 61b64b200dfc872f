"""StepLog: everyone adds, one call commits, one counter moves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter

from skyfleet.tracking.tracker import Tracker


class StepLog:
    def __init__(self, *trackers: Tracker) -> None:
        self._trackers = trackers
        self._metrics: dict[str, float] = {}
        self._last_step = -1

    @property
    def pending(self) -> dict[str, float]:
        """What the next row holds so far."""
        return dict(self._metrics)

    def add(self, metrics: Mapping[str, float]) -> None:
        if twice := self._metrics.keys() & metrics.keys():
            raise ValueError(f"logged twice in one step: {sorted(twice)}")
        self._metrics.update(metrics)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds `timing/{name}`, in seconds."""
        start = perf_counter()
        try:
            yield
        finally:
            self.add({f"timing/{name}": perf_counter() - start})

    def commit(self, step: int) -> None:
        """One row in every tracker; the next row starts empty."""
        if step <= self._last_step:
            raise ValueError(f"step {step} after step {self._last_step}")
        metrics, self._metrics, self._last_step = self._metrics, {}, step
        for tracker in self._trackers:
            tracker.log(metrics, step)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()
