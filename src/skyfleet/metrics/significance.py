"""Significance: could chance alone have done this?

All but Fisher's test is paired: the same tasks before and after. A task is the unit however often
it was attempted, so twenty attempts at one task are one observation.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from math import ceil, comb, inf, lcm, sqrt
from statistics import NormalDist

_MOST_ADDED = 300_000_000
"""Numbers to add up for an exact sign-flip test: a second or less."""


def mcnemar_exact(gained: int, lost: int) -> float:
    """Two-sided p of `gained` tasks that now pass and `lost` that now fail. (5, 0) gives 0.0625."""
    n = gained + lost
    tail = sum(comb(n, k) for k in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / (1 << n))


def sign_flip(differences: Sequence[float], *, n_draws: int = 100_000, seed: int = 0) -> float:
    """Two-sided p of the mean difference, were each task as likely to have gone the other way.

    So it is under no change where both policies tried a task equally often. Exact for rates of
    any usual number of attempts, otherwise from seeded draws; of single attempts it is McNemar's.
    """
    import numpy as np

    # Rounded, so that 2/3 - 1/3 and 1/3 - 0 are one size.
    sizes, counts = np.unique(np.round(np.abs(differences), 12), return_counts=True)
    sizes, counts = sizes[sizes > 0], counts[sizes > 0]
    least = abs(sum(differences)) - 1e-9
    scale = lcm(*(Fraction(size).limit_denominator(100).denominator for size in sizes.tolist()))
    steps = np.rint(scale * sizes)
    most = int(steps @ counts)
    if np.abs(steps / scale - sizes).max(initial=0) > 1e-9 or most * len(differences) > _MOST_ADDED:
        flipped = np.random.default_rng(seed).binomial(counts, 0.5, size=(n_draws, len(counts)))
        sums = (2 * flipped - counts) @ sizes
        return float((1 + np.sum(np.abs(sums) >= least)) / (1 + n_draws))
    chances = np.ones(1)  # of each sum of what is not flipped, in steps
    for step, count in zip(steps.astype(int).tolist(), counts.tolist(), strict=True):
        longer = np.zeros(len(chances) + step * count)
        for kept in range(count + 1):
            at = step * kept
            longer[at : at + len(chances)] += comb(count, kept) / 2**count * chances
        chances = longer
    sums = (2 * np.arange(most + 1) - most) / scale
    return min(1.0, float(chances[np.abs(sums) >= least].sum()))


def fisher_exact(before: int, after: int, n: int) -> float:
    """Two-sided p of two unrelated samples of n with so many passes. (1, 6, 7) gives 0.0291.

    The chance, their sum given, of a split no likelier than the one seen.
    """
    passed = before + after
    ways = [comb(n, k) * comb(n, passed - k) for k in range(max(0, passed - n), min(n, passed) + 1)]
    seen = comb(n, before) * comb(n, after)
    return sum(way for way in ways if way <= seen) / sum(ways)


def holm(p_values: Sequence[float]) -> list[float]:
    """Each p, corrected for having asked all (Holm 1979). `holm([0.01, 0.04])` is [0.02, 0.04]."""
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


_NORMAL_FROM = 50
"""Tasks. With fewer, an exact test finds less than the normal approximation promises."""


def tasks_needed(
    difference: float,
    discordance: float,
    *,
    attempts: int = 1,
    power: float = 0.8,
    alpha: float = 0.05,
) -> int:
    """Tasks for which a true `difference` is found significant with chance `power`.

    `discordance` is the mean squared per-task difference: for single attempts, the share of tasks
    whose result changed. Connor (1987); where that is few, the exact chance. (1.0, 1.0) gives 6.
    """
    if difference == 0 or discordance < difference**2:
        raise ValueError(
            f"difference={difference}, discordance={discordance}; "
            "give a difference other than 0 and a discordance of at least its square"
        )
    difference = abs(difference)
    discordance = _at_least(discordance, difference, attempts)
    n_tasks = ceil(_tasks_needed(difference, discordance, power, alpha))
    if n_tasks < _NORMAL_FROM:
        while _exact_power(n_tasks, difference, discordance, attempts, alpha) < power:
            n_tasks += 1
    return n_tasks


def detectable_difference(
    n_tasks: int,
    discordance: float,
    *,
    attempts: int = 1,
    power: float = 0.8,
    alpha: float = 0.05,
) -> float:
    """The smallest true difference that `n_tasks` find significant with chance `power`.

    Infinite when even a change of every task would not be enough, as for five tasks.
    """

    def enough(difference: float) -> bool:
        changed = _at_least(discordance, difference, attempts)
        if n_tasks < _NORMAL_FROM:
            return _exact_power(n_tasks, difference, changed, attempts, alpha) >= power
        return _tasks_needed(difference, changed, power, alpha) <= n_tasks

    if not enough(1.0):
        return inf
    low, high = 0.0, 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _at_least(discordance: float, difference: float, attempts: int) -> float:
    """A task differs by an attempt or more, so a larger difference brings discordance along."""
    return max(discordance, difference / attempts, difference**2)


def _tasks_needed(difference: float, discordance: float, power: float, alpha: float) -> float:
    z_alpha, z_power = NormalDist().inv_cdf(1 - alpha / 2), NormalDist().inv_cdf(power)
    spread = z_alpha * sqrt(discordance) + z_power * sqrt(discordance - difference**2)
    return (spread / difference) ** 2


def _exact_power(
    n_tasks: int, difference: float, discordance: float, attempts: int, alpha: float
) -> float:
    """Of McNemar's test, as if each task that changes did so by the same number of attempts."""
    from scipy.special import bdtr

    size = max(1 / attempts, sqrt(discordance))
    share = min(1.0, discordance / size**2)
    gained = min(1.0, (1 + difference / size / share) / 2)
    power = 0.0
    for n in range(n_tasks + 1):
        if (most_lost := _most_lost(n, alpha)) >= 0:
            # At most so many of the n that change may go against the others.
            found = bdtr(most_lost, n, 1 - gained) + bdtr(most_lost, n, gained)
            power += comb(n_tasks, n) * share**n * (1 - share) ** (n_tasks - n) * float(found)
    return power


@lru_cache
def _most_lost(n: int, alpha: float) -> int:
    """-1: so few changes are never significant. `_most_lost(6, 0.05)` is 0."""
    return max(
        (lost for lost in range(n // 2) if mcnemar_exact(n - lost, lost) < alpha), default=-1
    )
