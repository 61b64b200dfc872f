"""Advantages: the rewards of one group -> one number per attempt.

A group of one has nothing to be compared with: zero, not its raw score.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from skyfleet.algorithms.sample import Sample

GroupEstimator = Callable[[Sequence[float]], list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeBatch:
    """An estimator that looks beyond one group: a batch's samples in, the same with credit out."""

    credit: Callable[[Sequence[Sample]], list[Sample]]


Estimator = GroupEstimator | WholeBatch


def grpo(rewards: Sequence[float], *, norm_by_std: bool = True) -> list[float]:
    """How far each attempt lies above the group's mean, in sample deviations (arXiv 2402.03300).

    `grpo([1, 0, 0, 0])` is about `[1.5, -0.5, -0.5, -0.5]`. Without the deviation it is the
    advantage of Dr. GRPO (arXiv 2503.20783).
    """
    if len(rewards) < 2:
        return [0.0] * len(rewards)
    mean = fmean(rewards)
    scale = stdev(rewards) + 1e-6 if norm_by_std else 1.0
    return [(reward - mean) / scale for reward in rewards]


def rloo(rewards: Sequence[float]) -> list[float]:
    """Each attempt against the mean of the others (arXiv 2402.14740).

    `rloo([1, 0, 0])` is `[1.0, -0.5, -0.5]`.
    """
    n, total = len(rewards), sum(rewards)
    if n < 2:
        return [0.0] * n
    return [reward - (total - reward) / (n - 1) for reward in rewards]


def maxrl(rewards: Sequence[float]) -> list[float]:
    """The distance from the mean, in means: rare successes count most (arXiv 2602.02710).

    `maxrl([1, 0, 0, 0])` is about `[3, -1, -1, -1]`. It is made for rewards from 0 up: a mean of 0
    or less is no measure, and gives zeros.
    """
    mean = fmean(rewards) if rewards else 0.0
    if len(rewards) < 2 or mean <= 0:
        return [0.0] * len(rewards)
    return [(reward - mean) / (mean + 1e-6) for reward in rewards]
