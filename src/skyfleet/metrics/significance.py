"""Significance: could chance alone have done this, and how much could we have seen?

All but Fisher's test is paired: the same tasks before and after. A task is the unit however often
it was attempted, so twenty attempts at one task are one observation.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, comb, inf, prod, sqrt
from statistics import NormalDist

_MOST_ENUMERATED = 1_000_000


def mcnemar_exact(gained: int, lost: int) -> float:
    """Two-sided p of `gained` tasks that now pass and `lost` that now fail. (5, 0) gives 0.0625."""
    n = gained + lost
    tail = sum(comb(n, k) for k in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / (1 << n))


def sign_flip(differences: Sequence[float], *, n_draws: int = 100_000, seed: int = 0) -> float:
    """Two-sided p of the mean difference, were each task as likely to have gone the other way.

    Exact while the distinct sums can be listed, otherwise from seeded draws. For differences of
    one attempt it is McNemar's exact test.
    """
    import numpy as np

    # Rounded, so that 2/3 - 1/3 and 1/3 - 0 are one size.
    sizes, counts = np.unique(np.round(np.abs(differences), 12), return_counts=True)
    sizes, counts = sizes[sizes > 0], counts[sizes > 0]
    least = abs(sum(differences)) - 1e-9
    if prod(int(count) + 1 for count in counts) > _MOST_ENUMERATED:
        flipped = np.random.default_rng(seed).binomial(counts, 0.5, size=(n_draws, len(counts)))
        sums = (2 * flipped - counts) @ sizes
        return float((1 + np.sum(np.abs(sums) >= least)) / (1 + n_draws))
    sums, weights = np.zeros(1), np.ones(1)
    for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        outcomes = size * np.arange(-count, count + 1, 2)
        chances = np.array([comb(count, k) / 2**count for k in range(count + 1)])
        sums = np.add.outer(sums, outcomes).ravel()
        weights = np.multiply.outer(weights, chances).ravel()
    return min(1.0, float(weights[np.abs(sums) >= least].sum()))


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


def tasks_needed(
    difference: float, discordance: float, *, power: float = 0.8, alpha: float = 0.05
) -> int:
    """Tasks for which a true `difference` is found significant with chance `power`.

    `discordance` is the mean squared per-task difference: for single attempts, the share of tasks
    whose result changed. Connor (1987).
    """
    if difference == 0 or discordance < difference**2:
        raise ValueError(
            f"difference={difference}, discordance={discordance}; "
            "give a difference other than 0 and a discordance of at least its square"
        )
    return ceil(_tasks_needed(abs(difference), discordance, power, alpha))


def detectable_difference(
    n_tasks: int,
    discordance: float,
    *,
    attempts: int = 1,
    power: float = 0.8,
    alpha: float = 0.05,
) -> float:
    """The smallest true difference that `n_tasks` find significant with chance `power`.

    Infinite when even a change of every task would not be enough.
    """

    def enough(difference: float) -> bool:
        # A per-task difference is at least one attempt, so larger ones bring discordance along.
        least = max(difference / attempts, difference**2)
        return _tasks_needed(difference, max(discordance, least), power, alpha) <= n_tasks

    if not enough(1.0):
        return inf
    low, high = 0.0, 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _tasks_needed(difference: float, discordance: float, power: float, alpha: float) -> float:
    z_alpha, z_power = NormalDist().inv_cdf(1 - alpha / 2), NormalDist().inv_cdf(power)
    spread = z_alpha * sqrt(discordance) + z_power * sqrt(discordance - difference**2)
    return (spread / difference) ** 2
