"""Significance: could chance alone have done this?

All but Fisher's test is paired: the same tasks before and after. A task is the unit however often
it was attempted, so twenty attempts at one task are one observation.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import comb, lcm

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
