"""Unknown grades: how many attempts have none, and why the first has none."""

from __future__ import annotations

from collections.abc import Sequence

from skyfleet.trajectories.trajectory import Group


def told_unknown(groups: Sequence[Group]) -> str | None:
    """A sentence, where a grade is missing."""
    attempts = [attempt for group in groups for attempt in group.trajectories]
    n_unknown = sum(attempt.grade is None for attempt in attempts)
    if not n_unknown:
        return None
    return (
        f"{n_unknown} of {len(attempts)} attempts have no grade; the first: {why_unknown(groups)}"
    )


def why_unknown(groups: Sequence[Group]) -> str:
    """Of the first attempt without a grade that failed."""
    attempts = (attempt for group in groups for attempt in group.trajectories)
    failures = (attempt.failure for attempt in attempts if attempt.grade is None)
    first = next(filter(None, failures), None)
    return f"{first.kind}: {first.detail}"[:300] if first else "the environment gave no grade"
