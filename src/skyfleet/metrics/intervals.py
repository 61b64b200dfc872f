"""Intervals: what a success rate, or a change of one, may well be.

A task is the unit: many attempts make its own rate sure and say nothing of the tasks not drawn.
Each interval was chosen by its coverage at the sizes of an evaluation set (10 to 500 tasks), also
near 0 and 1, and where a few tasks decide everything; there the bootstrap and the normal
approximation promise far too much. `benchmarks/intervals.py` measures it; docs/evaluation.md has
the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import NormalDist, fmean

Interval = tuple[float, float]


def wilson(rate: float, n: int, *, confidence: float = 0.95) -> Interval:
    """Wilson's score interval of a proportion. `wilson(rate, 0)` is (0, 1): nothing is known."""
    if n == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    centre = rate + z * z / (2 * n)
    half = z * sqrt(rate * (1 - rate) / n + (z / (2 * n)) ** 2)
    scale = 1 + z * z / n
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def newcombe(before: float, after: float, n: int, *, confidence: float = 0.95) -> Interval:
    """Interval of (after - before) of two unrelated samples of n each.

    Newcombe (1998), method 10: the distances to the ends of the two Wilson intervals, squared.
    """
    low_before, high_before = wilson(before, n, confidence=confidence)
    low_after, high_after = wilson(after, n, confidence=confidence)
    difference = after - before
    down = sqrt((after - low_after) ** 2 + (high_before - before) ** 2)
    up = sqrt((high_after - after) ** 2 + (before - low_before) ** 2)
    return difference - down, difference + up


def mean_rate(rates: Sequence[float], *, confidence: float = 0.95) -> Interval:
    """Interval of the mean over tasks of each task's success rate, however often it was tried.

    Student's t after adding a task that never passes and one that always does, as Agresti and
    Coull (1998) add attempts: tasks that agree may be some of many that do not.
    """
    squares = sum(rate**2 for rate in rates)
    low, high = _students(sum(rates) + 1, squares + 1, len(rates) + 2, confidence)
    return max(0.0, low), min(1.0, high)


def paired_difference(differences: Sequence[float], *, confidence: float = 0.95) -> Interval:
    """Interval of the mean over tasks of (after - before), however often each was tried.

    Student's t after adding half a task that was gained and half a task that was lost: the idea
    of Bonett and Price (2012), who add two. Where no task changed, the end is Wilson's for no
    success in as many tasks.
    """
    if not any(differences):
        _, end = wilson(0.0, len(differences), confidence=confidence)
        return -end, end
    squares = sum(difference**2 for difference in differences)
    low, high = _students(sum(differences), squares + 1, len(differences) + 1, confidence)
    return max(-1.0, low), min(1.0, high)


def _students(total: float, squares: float, n: int, confidence: float) -> Interval:
    from scipy.special import stdtrit

    centre = total / n
    spread = sqrt((squares - n * centre**2) / (n - 1) / n)
    half = float(stdtrit(n - 1, (1 + confidence) / 2)) * spread
    return centre - half, centre + half


def cluster_bootstrap(
    rates: Sequence[float], *, confidence: float = 0.95, n_resamples: int = 10_000, seed: int = 0
) -> Interval:
    """Interval of the mean over tasks of what has no bounds, such as turns, resampling whole tasks.

    BCa, its levels widened from normal to Student's t, because few tasks make the bootstrap too
    sure. Tasks that all agree leave nothing to resample: then it is Wilson's, an attempt a task.
    """
    import numpy as np
    from scipy.special import ndtr, ndtri, stdtrit

    n = len(rates)
    mean = fmean(rates) if rates else 0.0
    if n == 0 or min(rates) == max(rates):
        return wilson(mean, n, confidence=confidence)
    values, counts = np.unique(np.asarray(rates, dtype=float), return_counts=True)
    # Tasks of equal rate are alike, so drawing how many of each comes to the same, and is cheap.
    drawn = np.random.default_rng(seed).multinomial(n, counts / n, size=n_resamples)
    means = np.sort(drawn @ values / n)
    deviations = values - mean
    acceleration = (counts @ deviations**3) / (6 * (counts @ deviations**2) ** 1.5)
    below = (np.mean(means < mean) + np.mean(means <= mean)) / 2
    bias = ndtri(np.clip(below, 1 / n_resamples, 1 - 1 / n_resamples))
    tail = (1 - confidence) / 2
    z = bias + sqrt(n / (n - 1)) * stdtrit(n - 1, np.array([tail, 1 - tail]))
    low, high = np.quantile(means, ndtr(bias + z / (1 - acceleration * z)))
    return float(low), float(high)
