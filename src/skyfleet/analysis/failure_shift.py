"""Failure shift: how many of the episodes ended in each class before and after, task by task."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

from skyfleet.analysis.before_after import is_clear
from skyfleet.analysis.failure_class import FailureClass
from skyfleet.metrics.intervals import paired_difference

PASSED = "passed"
_ORDER = (PASSED, *map(str, FailureClass))

Ended = tuple[Hashable, FailureClass | None]
"""An episode: its task, and why it failed; None where it passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    name: str
    """Of the class, or `passed`."""
    n_tasks: int
    before: float
    """Share of the episodes; each task weighs the same, and its attempts are averaged first."""
    after: float
    difference: float
    interval: tuple[float, float]
    """95 % of the difference, task by task, as for a change of pass@1."""

    @property
    def clear(self) -> bool:
        return is_clear(self.n_tasks, self.interval)


def class_shifts(before: Iterable[Ended], after: Iterable[Ended]) -> list[Shift]:
    """Every class that was seen, in the order of tables, over the tasks that both have.

    `class_shifts([("t", FailureClass.LOOP)], [("t", None)])` says `passed` 0 to 1, then loop 1 to 0.
    """
    one, other = _shares(before), _shares(after)
    tasks = [task for task in one if task in other]
    names = {name for task in tasks for side in (one, other) for name in side[task]}
    return [
        _shift(name, [one[task] for task in tasks], [other[task] for task in tasks])
        for name in _ORDER
        if name in names
    ]


def _shift(
    name: str, one: Iterable[Mapping[str, float]], other: Iterable[Mapping[str, float]]
) -> Shift:
    before = [shares.get(name, 0.0) for shares in one]
    after = [shares.get(name, 0.0) for shares in other]
    # Rounded, so that thirds which cancel are a plain zero.
    differences = [round(b - a, 12) for a, b in zip(before, after, strict=True)]
    return Shift(
        name=name,
        n_tasks=len(before),
        before=fmean(before),
        after=fmean(after),
        difference=fmean(differences),
        # Shares are near 0 more often than not, where a bootstrap is too sure.
        interval=paired_difference(differences),
    )


def _shares(episodes: Iterable[Ended]) -> dict[Hashable, dict[str, float]]:
    counts: dict[Hashable, Counter[str]] = defaultdict(Counter)
    for task, failure in episodes:
        counts[task][str(failure or PASSED)] += 1
    return {
        task: {name: n / of_task.total() for name, n in of_task.items()}
        for task, of_task in counts.items()
    }
