"""Prompts times attempts are what was played, and each is learned from or left out by name."""

from __future__ import annotations

from collections.abc import Sequence
from math import isclose

from skyfleet.sentinels.finding import Finding, found
from skyfleet.sentinels.invariants import Invariants
from skyfleet.sentinels.stages import Credited
from skyfleet.trajectories.trajectory import Group

ATTEMPTS, ADDED = "unknown_grade", "copied"
"""Of the filters' reasons the one that counts attempts, and the one that adds groups."""


def batch_accounting(credited: Credited) -> Finding | None:
    return _played(credited) or _kept(credited) or _same_attempts(credited)


def _played(credited: Credited) -> Finding | None:
    expected, groups = credited.expected, credited.groups
    if not groups or len(groups) % expected.batch_size:
        return found(
            "what was played is no whole number of batches",
            groups=len(groups),
            train_batch_size=expected.batch_size,
        )
    for group in groups:
        if any(attempt.task_key != group.task_key for attempt in group.trajectories):
            return found("a group holds an attempt at another task", task=group.task_key)
        if len(group.trajectories) != expected.n_samples:
            return found(
                "a group has another number of attempts than generator.n_samples_per_prompt",
                task=group.task_key,
                attempts=len(group.trajectories),
                wanted=expected.n_samples,
            )
    return None


def _kept(credited: Credited) -> Finding | None:
    kept, considered = credited.kept, _considered(credited.groups, credited.expected)
    keys = {group.task_key for group in kept.groups}
    if len(keys) != len(kept.groups) and len(considered) == len({g.task_key for g in considered}):
        return found(
            "two groups that are learned from have one key, so they would be credited as one",
            groups=len(kept.groups),
            keys=len(keys),
        )
    if credited.expected.dynamic_sampling == "filter":
        n_considered = len({group.task_key for group in considered})
    else:
        n_considered = len(considered)
    left_out = {reason: n for reason, n in kept.dropped.items() if reason not in (ATTEMPTS, ADDED)}
    learned = len(kept.groups) - kept.dropped[ADDED]
    if learned + sum(left_out.values()) != n_considered:
        return found(
            "groups are neither learned from nor left out for a reason",
            played=n_considered,
            learned=learned,
            **left_out,
        )
    unknown = sum(len(group.trajectories) - len(group.graded) for group in considered)
    if kept.dropped[ATTEMPTS] != unknown:
        return found(
            "attempts of unknown grade are not counted as they were played",
            unknown=unknown,
            counted=kept.dropped[ATTEMPTS],
        )
    return None


def _same_attempts(credited: Credited) -> Finding | None:
    """What is kept of a task is its graded attempts and what they earned."""
    earned: dict[str, list[float]] = {}
    for group in _considered(credited.groups, credited.expected):
        earned.setdefault(group.task_key, []).extend(group.rewards)
    kept: dict[str, list[float]] = {}
    for group in credited.kept.groups:
        kept.setdefault(group.task_key, []).extend(group.rewards)
    for task_key, rewards in kept.items():
        played = earned.get(task_key)
        if played is None:
            continue  # a copy, which has a key of its own
        same = credited.expected.changes_rewards or all(map(isclose, rewards, played))
        if len(rewards) != len(played) or not same:
            return found(
                "the rewards that are learned from are not those that were earned",
                task=task_key,
                graded=len(played),
                kept=len(rewards),
                earned=sum(played),
                learned=sum(rewards),
            )
    return None


def _considered(groups: Sequence[Group], expected: Invariants) -> Sequence[Group]:
    """`replace` looks at the last batch only."""
    return groups[-expected.batch_size :] if expected.dynamic_sampling == "replace" else groups
