"""Intervals: what a success rate, or a change of one, may well be.

A task is the unit: many attempts make its own rate sure and say nothing of the tasks not drawn.
Each interval was chosen by its coverage at the sizes of an evaluation set (20 to 500 tasks), also
near 0 and 1, and where a few tasks decide everything; there the bootstrap and the normal
approximation promise far too much. `benchmarks/intervals.py` measures it; docs/evaluation.md has
the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, sqrt
from statistics import NormalDist, fmean

Interval = tuple[float, float]

# Tasks that agree may be some of many that do not, so a task at the far end counts as seen, for
# this part of one. Chosen by simulation: more is too wide where attempts at a task vary a little,
# less is too narrow where a few tasks flip whole. Among many tasks the few are drowned in what the
# attempts at all others vary, so a difference counts more of a task where there are more.
_UNSEEN_TASK = 0.5
_UNSEEN_FLIP = 0.1
_UNSEEN_FLIP_PER_TASK = 0.001


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
    """Interval of the mean over tasks of each task's success rate, or of other scores in [0, 1].

    Wilson's score interval for clusters: how fast the variance changes with the mean is told by
    the skewness of the rates (Brown, Cai and DasGupta 2003, variance functions), not by p(1 - p),
    and the quantile is Student's. Of single attempts at many tasks it is Wilson's.
    """
    n = len(rates)
    if n == 0:
        return 0.0, 1.0
    mean, squares, cubes = _moments(rates)
    scale = _students_t(n, confidence) ** 2 / n

    def reach(cubes: float, room: float) -> float:
        seen = squares + _UNSEEN_TASK * room**2
        growth = (cubes + _UNSEEN_TASK * room**3) / seen if seen else 0.0
        return _root(1 + scale, scale * growth, scale * squares / n)

    return max(0.0, mean - reach(-cubes, mean)), min(1.0, mean + reach(cubes, 1 - mean))


def paired_difference(differences: Sequence[float], *, confidence: float = 0.95) -> Interval:
    """Interval of the mean over tasks of (after - before), however often each was tried.

    Student's t, with its variance growing where the differences are skewed to, by half of what
    their skewness says (cf. Johnson 1978, who shifts t); it never shrinks, for tasks may be lost
    that were not seen to be. Where no task changed, the end is Wilson's for no success in as many.
    """
    n = len(differences)
    if not any(differences):
        _, end = wilson(0.0, n, confidence=confidence)
        return -end, end
    mean, squares, cubes = _moments(differences)
    scale = _students_t(n, confidence) ** 2 / n
    unseen = _UNSEEN_FLIP + _UNSEEN_FLIP_PER_TASK * n

    def reach(cubes: float) -> float:
        growth = max(0.0, (cubes / 2 + unseen) / (squares + unseen))
        return _root(1.0, scale * growth, scale * squares / max(1, n - 1))

    return max(-1.0, mean - reach(-cubes)), min(1.0, mean + reach(cubes))


def _moments(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean, and the sums of the squares and cubes of what deviates from it."""
    mean = fmean(values)
    deviations = [value - mean for value in values]
    return mean, sum(d**2 for d in deviations), sum(d**3 for d in deviations)


def _students_t(n: int, confidence: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(max(1, n - 1), (1 + confidence) / 2))


def _root(a: float, b: float, c: float) -> float:
    """The h above 0 with a h² = b h + c."""
    return (b + sqrt(b * b + 4 * a * c)) / (2 * a)


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


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that one of k drawn attempts is among the c that succeeded. (4, 1, 2) gives 0.5."""
    _check(n, c, k)
    return 1.0 - comb(n - c, k) / comb(n, k)


def pass_hat_k(n: int, c: int, k: int) -> float:
    """Chance that all k drawn attempts are among the c that succeeded. (4, 3, 2) gives 0.5."""
    _check(n, c, k)
    return comb(c, k) / comb(n, k)


def _check(n: int, c: int, k: int) -> None:
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"n={n}, c={c}, k={k}; give 0 <= c <= n and 1 <= k <= n")
