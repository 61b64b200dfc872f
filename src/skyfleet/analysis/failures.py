"""Failures: an episode that did not pass -> why, by rules that need no model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from skyfleet.analysis.failure_class import Evidence as Evidence
from skyfleet.analysis.failure_class import FailureClass as FailureClass
from skyfleet.analysis.failure_rules import RULES, errors_seen
from skyfleet.trajectories.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    primary: Evidence
    """Of the first rule that holds."""
    others: tuple[Evidence, ...]
    """Of the other rules that hold, then of every error seen on the way, by turn."""

    @property
    def failure_class(self) -> FailureClass:
        return self.primary.failure_class


def classify(trajectory: Trajectory) -> FailureClass | None:
    """Why it did not pass; None when it passed."""
    if trajectory.success:
        return None
    return next(filter(None, (rule(trajectory) for rule in RULES))).failure_class


def diagnose(trajectory: Trajectory) -> Diagnosis | None:
    """The class with all that speaks for it and for others; None when it passed."""
    if trajectory.success:
        return None
    primary, *others = filter(None, (rule(trajectory) for rule in RULES))
    seen = dict.fromkeys((*others, *errors_seen(trajectory)))
    return Diagnosis(primary=primary, others=tuple(one for one in seen if one != primary))


def failure_counts(trajectories: Iterable[Trajectory]) -> dict[FailureClass, int]:
    """How many there are of each class, the most frequent first; what passed is in none."""
    counts = Counter(filter(None, map(classify, trajectories)))
    return dict(counts.most_common())
