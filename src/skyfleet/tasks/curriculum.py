"""Curriculum: tasks that are sometimes solved are worth more draws than those always or never are.

With p the recent pass rate of a task, its weight is `floor + (1 - floor) * 4 p (1 - p)`: the
variance of a pass, which is what a group of attempts can teach, scaled so that p = 1/2 weighs 1. The
counts behind p fade by `decay` with every new group, and one pass and one failure stand before the
first, so that a task nobody has tried weighs 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from skyfleet.errors import CheckpointError
from skyfleet.tasks.task import Task


class Curriculum:
    def __init__(self, *, decay: float = 0.8, floor: float = 0.1) -> None:
        """`floor` is what a task weighs that is always or never solved."""
        self._settings = {"decay": decay, "floor": floor}
        self._counts: dict[str, tuple[float, float]] = {}

    def observe(self, key: str, *, passed: int, failed: int) -> None:
        """One group of attempts; those with an unknown grade are in neither number."""
        decay = self._settings["decay"]
        before_passed, before_failed = self._counts.get(key, (0.0, 0.0))
        self._counts[key] = (decay * before_passed + passed, decay * before_failed + failed)

    def pass_rate(self, key: str) -> float:
        passed, failed = self._counts.get(key, (0.0, 0.0))
        return (passed + 1) / (passed + failed + 2)

    def weight(self, key: str) -> float:
        rate, floor = self.pass_rate(key), self._settings["floor"]
        return floor + (1 - floor) * 4 * rate * (1 - rate)

    def weights(self, tasks: Iterable[Task]) -> list[float]:
        return [self.weight(task.key) for task in tasks]

    def state_dict(self) -> dict[str, Any]:
        counts = {key: list(pair) for key, pair in sorted(self._counts.items())}
        return {**self._settings, "counts": counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in self._settings.items():
            if state.get(name) != value:
                raise CheckpointError(
                    f"the curriculum was saved with {name}={state.get(name)!r} and now has "
                    f"{value!r}; resume with what it was saved with"
                )
        self._counts = {key: (passed, failed) for key, (passed, failed) in state["counts"].items()}
