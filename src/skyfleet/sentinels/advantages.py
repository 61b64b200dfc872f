"""Advantages are what the estimator promises: centred, and higher where more was earned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum, isclose, isfinite, sqrt
from statistics import fmean

import numpy as np

from skyfleet.algorithms.sample import Sample
from skyfleet.sentinels.finding import Finding, found
from skyfleet.sentinels.stages import Credited, Digest

NEARLY = 1e-3
ROUNDING = 1e-6
"""Of rewards that are all the same 0.1, whose mean is not quite 0.1."""
SAME, TINY = 1e-4, 1e-9
"""Nearer to the mean than the first, a reward may round to either side; than the second, it is it."""


def advantages(credited: Credited) -> Finding | None:
    if credited.expected.centred == "group":
        return _groups(credited)
    if credited.expected.centred == "batch":
        return _batch(credited.samples)
    return None


def _batch(samples: Sequence[Sample]) -> Finding | None:
    values = np.array(
        [a for sample in samples for a in sample.select_action_tokens(sample.advantages)]
    )
    if len(values) < 2 or np.abs(values).max() < ROUNDING:
        return None
    mean, deviation = float(values.mean()), float(values.std())
    # Less than 1 where tokens hardly differ: whitening divides by a little more than their deviation.
    if abs(mean) < NEARLY and deviation < 1 + 1 / len(values) + NEARLY:
        return None
    return found(
        "the batch's advantages have another mean than 0 or deviate by more than 1",
        mean=mean,
        deviation=deviation,
        tokens=len(values),
    )


def _groups(credited: Credited) -> Finding | None:
    rewards: dict[str, list[float]] = {}
    for group in credited.kept.groups:
        rewards.setdefault(group.task_key, []).extend(group.rewards)
    values: dict[str, dict[int, float]] = {task_key: {} for task_key in rewards}
    for sample, digest in zip(credited.samples, credited.digests, strict=True):
        value = sample.advantages[-1]
        first = values.setdefault(sample.task_key, {}).setdefault(sample.attempt, value)
        if not ((first is value or isclose(first, value)) and _sums(value, digest)):
            return _mixed(sample)
    if odd := next((sample for sample in credited.closely if not _even(sample)), None):
        return _mixed(odd)
    return _first_wrong(values, rewards, unit_deviation=credited.expected.unit_deviation)


def groups_again(samples: Sequence[Sample], *, unit_deviation: bool) -> Finding | None:
    """The same of the learner's own credit, for rewards that penalties have changed."""
    earned: dict[str, list[float]] = {}
    values: dict[str, dict[int, float]] = {}
    for sample in samples:
        rewards = earned.setdefault(sample.task_key, list(sample.group_rewards))
        rewards[sample.attempt] -= fsum(sample.penalties)
        values.setdefault(sample.task_key, {})[sample.attempt] = sample.advantages[-1]
    return _first_wrong(values, earned, unit_deviation=unit_deviation)


def _first_wrong(
    values: Mapping[str, dict[int, float]],
    rewards: Mapping[str, Sequence[float]],
    *,
    unit_deviation: bool,
) -> Finding | None:
    """By task: attempts' advantages, beside what every attempt earned."""
    for task_key, given in values.items():
        earned = rewards.get(task_key, ())
        wrong = _unlike_earned(task_key, given, earned) or _uneven(
            task_key, given, earned, unit_deviation=unit_deviation
        )
        if wrong:
            return wrong
    return None


def _sums(value: float, digest: Digest) -> bool:
    """As many tokens as were chosen have this advantage in all."""
    due = digest.n_action_tokens * value
    return isfinite(value) and isclose(digest.advantages, due, rel_tol=1e-9, abs_tol=1e-9)


def _even(sample: Sample) -> bool:
    """And token by token."""
    value = sample.advantages[-1]
    n_due = sample.n_action_tokens if value else len(sample.advantages)
    return sample.advantages.count(value) == n_due


def _mixed(sample: Sample) -> Finding:
    return found(
        "an attempt's tokens have different advantages, or some that it did not choose",
        task=sample.task_key,
        attempt=sample.attempt,
    )


def _unlike_earned(
    task_key: str, given: dict[int, float], earned: Sequence[float]
) -> Finding | None:
    """Who earned more than the mean has a positive advantage, and who earned the mean has none."""
    mean = fmean(earned) if earned else 0.0
    for attempt, value in given.items():
        gain = earned[attempt] - mean if attempt < len(earned) else 0.0
        if (abs(gain) > SAME and gain * value <= 0) or (abs(gain) < TINY and abs(value) > NEARLY):
            return found(
                "an advantage is not as good as what was earned, beside the group's mean",
                task=task_key,
                attempt=attempt,
                above_mean=gain,
                advantage=value,
                graded=len(earned),
            )
    return None


def _uneven(
    task_key: str, given: dict[int, float], earned: Sequence[float], *, unit_deviation: bool
) -> Finding | None:
    if len(given) < max(len(earned), 2):
        return None  # the rest teach nothing, and their share of the sum is not known
    total, size = fsum(given.values()), fsum(map(abs, given.values()))
    if abs(total) > NEARLY * size + ROUNDING:
        return found("a group's advantages do not sum to zero", task=task_key, sum=total, size=size)
    deviation = sqrt(fsum(value * value for value in given.values()) / (len(given) - 1))
    if unit_deviation and max(earned) - min(earned) > NEARLY and abs(deviation - 1) > 10 * NEARLY:
        return found(
            "a group's advantages do not deviate by one", task=task_key, deviation=deviation
        )
    return None
