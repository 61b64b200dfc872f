"""StepLog: collects the metrics of one step and writes them to every tracker in one call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter

from skyfleet.tracking.background import RunState
from skyfleet.tracking.tracker import FileTracker, RemoteTracker, Tracker

PHASE_NAMES = {"rollout": "generate", "learn": "train_critic_and_policy"}
"""Phases of the loop that are logged under SkyRL's name; all others keep their own."""

_OUTSIDE_STEP = frozenset({"eval", "save_checkpoints", "save_hf_model"})
"""Phases that `timing/step` does not include."""


class StepLog:
    def __init__(self, *trackers: Tracker) -> None:
        self._trackers = trackers
        self._metrics: dict[str, float] = {}
        self._last_step = -1
        self._step_started: float | None = None
        self._outside_seconds = 0.0

    @property
    def pending(self) -> dict[str, float]:
        """The metrics added since the last commit."""
        return dict(self._metrics)

    def add(self, metrics: Mapping[str, float]) -> None:
        if twice := self._metrics.keys() & metrics.keys():
            raise ValueError(f"logged twice in one step: {sorted(twice)}")
        self._metrics.update(metrics)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add `timing/{phase}` in seconds, also when the block raises. See `PHASE_NAMES`.

        A phase adds up if it runs twice, as an export does that a resumed run writes again.
        """
        name = PHASE_NAMES.get(phase, phase)
        start = perf_counter()
        if name == "generate":
            self._step_started, self._outside_seconds = start, 0.0
        try:
            yield
        finally:
            seconds = perf_counter() - start
            if name in _OUTSIDE_STEP:
                self._outside_seconds += seconds
            key = f"timing/{name}"
            self._metrics[key] = self._metrics.get(key, 0.0) + seconds

    def commit(self, step: int) -> None:
        """Write one row to every tracker and start the next row empty."""
        if step <= self._last_step:
            raise ValueError(f"step {step} after step {self._last_step}")
        if "timing/generate" in self._metrics:
            self.add({"timing/step": self._step_seconds()})
        metrics, self._metrics, self._last_step = self._metrics, {}, step
        self._step_started = None
        for tracker in self._trackers:
            tracker.log(metrics, step)

    @property
    def stores_files(self) -> bool:
        """Whether a tracker keeps the files of a run."""
        return any(isinstance(tracker, FileTracker) for tracker in self._trackers)

    def attach(self, name: str, text: str) -> None:
        """Store a text file with every tracker that keeps files."""
        for tracker in self._trackers:
            if isinstance(tracker, FileTracker):
                tracker.attach(name, text)

    def sync(self) -> None:
        """Make every committed row durable."""
        for tracker in self._trackers:
            tracker.sync()

    def finish(self, state: RunState = "finished") -> None:
        """Every tracker starts to send its rest, and how the run ended: the deadlines of several run at the same time."""
        for tracker in self._trackers:
            if isinstance(tracker, RemoteTracker):
                tracker.finish(state)

    def close(self) -> None:
        self.finish()
        for tracker in self._trackers:
            tracker.close()

    def _step_seconds(self) -> float:
        """Wall time since generation began, without evaluations and checkpoints.

        A resumed run may commit a step that an earlier process generated; then it is the sum of
        the phases that process recorded.
        """
        if self._step_started is not None:
            return perf_counter() - self._step_started - self._outside_seconds
        timings = {
            key.removeprefix("timing/"): value
            for key, value in self._metrics.items()
            if key.startswith("timing/")
        }
        return sum(v for k, v in timings.items() if k not in _OUTSIDE_STEP)
