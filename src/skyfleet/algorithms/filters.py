"""Filters: which attempts and groups may teach."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from skyfleet.trajectories.trajectory import Ending, Group


@dataclass(frozen=True, slots=True)
class Kept:
    groups: tuple[Group, ...]
    dropped: Counter[str]
    """Reason -> how many: attempts for `unknown_grade`, groups for the rest."""


def keep_graded(groups: Iterable[Group]) -> Kept:
    """Leave out attempts whose grade is unknown, and groups of which none or one is left.

    An unknown grade read as zero would shift its siblings' mean; one attempt compares with nobody.
    """
    kept: list[Group] = []
    dropped: Counter[str] = Counter(unknown_grade=0, too_few_graded=0)
    for group in groups:
        graded = group.graded
        dropped["unknown_grade"] += len(group.trajectories) - len(graded)
        if len(graded) < 2:
            dropped["too_few_graded"] += 1
        else:
            kept.append(replace(group, trajectories=graded))
    return Kept(tuple(kept), dropped)


def drop_zero_variance(groups: Iterable[Group], *, tolerance: float = 1e-6) -> Kept:
    """Leave out groups whose attempts all earned the same: they carry no comparison."""
    kept: list[Group] = []
    dropped: Counter[str] = Counter(zero_variance=0)
    for group in groups:
        rewards = group.rewards
        if max(rewards) - min(rewards) <= tolerance:
            dropped["zero_variance"] += 1
        else:
            kept.append(group)
    return Kept(tuple(kept), dropped)


def zero_unfinished(groups: Iterable[Group]) -> tuple[Group, ...]:
    """Give no reward to an episode that was cut short (`generator.zero_reward_on_non_stop`)."""
    return tuple(
        replace(
            group,
            trajectories=tuple(
                replace(t, grade=replace(t.grade, reward=0.0, success=False))
                if t.grade is not None and t.ending is not Ending.DONE
                else t
                for t in group.trajectories
            ),
        )
        for group in groups
    )
