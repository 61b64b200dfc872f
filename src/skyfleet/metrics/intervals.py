"""Confidence intervals of success rates and of their differences; pass@k and pass^k.

A task is the unit of observation: more attempts make a task's own rate more precise and say nothing
about tasks that are not in the set. Each interval was chosen by its coverage at the usual sizes of
an evaluation set (20 to 500 tasks), also near 0 and 1 and where a few tasks decide the result.
There the bootstrap and the normal approximation are far too narrow. `benchmarks/intervals.py`
measures the coverage; docs/evaluation.md has the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, sqrt
from statistics import NormalDist, fmean

Interval = tuple[float, float]

# If all sampled tasks agree, others may still differ. So each interval adds a pseudo-task at the far
# end with this weight. Chosen by simulation: a larger weight is too wide if attempts at a task vary
# little, a smaller one too narrow if a few tasks flip completely. With many tasks the few that flip
# are lost in the variation of the others, so the weight of a difference grows with their number.
_PSEUDO_TASK = 0.5
_PSEUDO_FLIP = 0.1
_PSEUDO_FLIP_PER_TASK = 0.001


def wilson(rate: float, n: int, *, confidence: float = 0.95) -> Interval:
    """Wilson's score interval of a proportion; `wilson(rate, 0)` is (0, 1)."""
    if n == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    centre = rate + z * z / (2 * n)
    half = z * sqrt(rate * (1 - rate) / n + (z / (2 * n)) ** 2)
    scale = 1 + z * z / n
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def newcombe(before: float, after: float, n: int, *, confidence: float = 0.95) -> Interval:
    """Interval of (after - before) for two independent samples of n each.

    Newcombe (1998), method 10: combines the distances to the ends of the two Wilson intervals.
    """
    low_before, high_before = wilson(before, n, confidence=confidence)
    low_after, high_after = wilson(after, n, confidence=confidence)
    difference = after - before
    down = sqrt((after - low_after) ** 2 + (high_before - before) ** 2)
    up = sqrt((high_after - after) ** 2 + (before - low_before) ** 2)
    return difference - down, difference + up


def mean_rate(rates: Sequence[float], *, confidence: float = 0.95) -> Interval:
    """Interval of the mean over tasks of each task's success rate, or of other scores in [0, 1].

    Wilson's score interval for clusters: the skewness of the rates, not p(1 - p), says how fast the
    variance changes with the mean (Brown, Cai and DasGupta 2003, variance functions), and the
    quantile is Student's. With single attempts at many tasks it equals Wilson's interval.
    """
    n = len(rates)
    if n == 0:
        return 0.0, 1.0
    mean, squares, cubes = _moments(rates)
    scale = _students_t(n, confidence) ** 2 / n

    def distance(cubes: float, space: float) -> float:
        weighted = squares + _PSEUDO_TASK * space**2
        growth = (cubes + _PSEUDO_TASK * space**3) / weighted if weighted else 0.0
        return _root(1 + scale, scale * growth, scale * squares / n)

    return max(0.0, mean - distance(-cubes, mean)), min(1.0, mean + distance(cubes, 1 - mean))


def paired_difference(differences: Sequence[float], *, confidence: float = 0.95) -> Interval:
    """Interval of the mean over tasks of (after - before), for any number of attempts per task.

    Student's t, whose variance grows towards the side of the skewness by half of what the skewness
    says (cf. Johnson 1978, who shifts t). It never shrinks, because a change that no sampled task
    shows is still possible. If no task changed, the ends are Wilson's for no success in n.
    """
    n = len(differences)
    if not any(differences):
        _, end = wilson(0.0, n, confidence=confidence)
        return -end, end
    mean, squares, cubes = _moments(differences)
    scale = _students_t(n, confidence) ** 2 / n
    pseudo = _PSEUDO_FLIP + _PSEUDO_FLIP_PER_TASK * n

    def distance(cubes: float) -> float:
        growth = max(0.0, (cubes / 2 + pseudo) / (squares + pseudo))
        return _root(1.0, scale * growth, scale * squares / max(1, n - 1))

    return max(-1.0, mean - distance(-cubes)), min(1.0, mean + distance(cubes))


def repeated_mean(values: Sequence[float], *, confidence: float = 0.95) -> Interval:
    """Student's interval of the mean of repeated measurements, such as seconds; never below 0.

    A single measurement says nothing about its spread: both ends are its value.
    """
    n, mean = len(values), fmean(values)
    if n == 1:
        return mean, mean
    squares = sum((value - mean) ** 2 for value in values)
    half = _students_t(n, confidence) * sqrt(squares / (n - 1) / n)
    return max(0.0, mean - half), mean + half


def _moments(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean, and the sums of the squared and cubed deviations from it."""
    mean = fmean(values)
    deviations = [value - mean for value in values]
    return mean, sum(d**2 for d in deviations), sum(d**3 for d in deviations)


def _students_t(n: int, confidence: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(max(1, n - 1), (1 + confidence) / 2))


def _root(a: float, b: float, c: float) -> float:
    """The positive h that solves a h² = b h + c."""
    return (b + sqrt(b * b + 4 * a * c)) / (2 * a)


def cluster_bootstrap(
    rates: Sequence[float], *, confidence: float = 0.95, n_resamples: int = 10_000, seed: int = 0
) -> Interval:
    """Interval of the mean over tasks of an unbounded quantity such as turns, resampling tasks.

    BCa with levels from Student's t instead of the normal, because the bootstrap is too narrow with
    few tasks. If all tasks agree there is nothing to resample, and it is Wilson's interval for n.
    """
    import numpy as np
    from scipy.special import ndtr, ndtri, stdtrit

    n = len(rates)
    mean = fmean(rates) if rates else 0.0
    if n == 0 or min(rates) == max(rates):
        return wilson(mean, n, confidence=confidence)
    values, counts = np.unique(np.asarray(rates, dtype=float), return_counts=True)
    # Tasks of equal rate are interchangeable, so drawing their counts is equivalent and cheaper.
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
    """Probability that at least one of k attempts drawn from n is a success. (4, 1, 2) gives 0.5."""
    _check_counts(n, c, k)
    return 1.0 - comb(n - c, k) / comb(n, k)


def pass_hat_k(n: int, c: int, k: int) -> float:
    """Probability that all k attempts drawn from n are successes. (4, 3, 2) gives 0.5."""
    _check_counts(n, c, k)
    return comb(c, k) / comb(n, k)


def _check_counts(n: int, c: int, k: int) -> None:
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"n={n}, c={c}, k={k}; give 0 <= c <= n and 1 <= k <= n")
