"""Significance tests and power of a comparison of two success rates.

All tests except Fisher's are paired: the same tasks before and after. A task is the unit of
observation, however often it was attempted: twenty attempts at one task are one observation.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from math import ceil, comb, inf, lcm, sqrt
from statistics import NormalDist

_MAX_ADDITIONS = 300_000_000
"""Limit of the exact sign-flip test: so many additions take a second or less."""


def mcnemar_exact(gained: int, lost: int) -> float:
    """Two-sided p for `gained` tasks that now pass and `lost` that now fail. (5, 0) gives 0.0625."""
    n = gained + lost
    tail = sum(comb(n, k) for k in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / (1 << n))


def sign_flip(differences: Sequence[float], *, n_draws: int = 100_000, seed: int = 0) -> float:
    """Two-sided p of the mean difference; under the null, each task's sign is a fair coin.

    That holds without a change if both policies attempted each task equally often. Exact where
    the differences have a small common denominator, otherwise from seeded random draws. With
    single attempts it equals McNemar's test.
    """
    import numpy as np

    # Rounded, so that 2/3 - 1/3 and 1/3 - 0 count as the same size.
    sizes, counts = np.unique(np.round(np.abs(differences), 12), return_counts=True)
    sizes, counts = sizes[sizes > 0], counts[sizes > 0]
    least = abs(sum(differences)) - 1e-9
    scale = lcm(*(Fraction(size).limit_denominator(100).denominator for size in sizes.tolist()))
    steps = np.rint(scale * sizes)
    most = int(steps @ counts)
    if (
        np.abs(steps / scale - sizes).max(initial=0) > 1e-9
        or most * len(differences) > _MAX_ADDITIONS
    ):
        flipped = np.random.default_rng(seed).binomial(counts, 0.5, size=(n_draws, len(counts)))
        sums = (2 * flipped - counts) @ sizes
        return float((1 + np.sum(np.abs(sums) >= least)) / (1 + n_draws))
    chances = np.ones(
        1
    )  # probability of each sum of the differences that keep their sign, in steps
    for step, count in zip(steps.astype(int).tolist(), counts.tolist(), strict=True):
        longer = np.zeros(len(chances) + step * count)
        for kept in range(count + 1):
            at = step * kept
            longer[at : at + len(chances)] += comb(count, kept) / 2**count * chances
        chances = longer
    sums = (2 * np.arange(most + 1) - most) / scale
    return min(1.0, float(chances[np.abs(sums) >= least].sum()))


def fisher_exact(before: int, after: int, n: int) -> float:
    """Two-sided p for two independent samples of n with these passes. (1, 6, 7) gives 0.0291."""
    # Imported here: scipy.stats takes more than a second to import, and only this test needs it.
    import numpy as np
    from scipy import stats

    table = np.array([[before, n - before], [after, n - after]])
    return float(stats.fisher_exact(table).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for multiple tests (Holm 1979). `holm([0.01, 0.04])` is [0.02, 0.04]."""
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


_NORMAL_FROM = 50
"""With fewer tasks the normal approximation overstates the power of the exact test."""


def tasks_needed(
    difference: float,
    discordance: float,
    *,
    attempts: int = 1,
    power: float = 0.8,
    alpha: float = 0.05,
) -> int:
    """The number of tasks for which a true `difference` is significant with probability `power`.

    `discordance` is the mean squared per-task difference: for single attempts, the share of tasks
    whose result changed. Connor (1987); below 50 tasks the exact power. (1.0, 1.0) gives 6.
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
    """The smallest true difference that is significant on `n_tasks` with probability `power`.

    Infinite if even a change of every task would not be significant, as with five tasks.
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
    """A task that differs differs by at least one attempt, which bounds the discordance from below."""
    return max(discordance, difference / attempts, difference**2)


def _tasks_needed(difference: float, discordance: float, power: float, alpha: float) -> float:
    z_alpha, z_power = NormalDist().inv_cdf(1 - alpha / 2), NormalDist().inv_cdf(power)
    spread = z_alpha * sqrt(discordance) + z_power * sqrt(discordance - difference**2)
    return (spread / difference) ** 2


def _exact_power(
    n_tasks: int, difference: float, discordance: float, attempts: int, alpha: float
) -> float:
    """Power of McNemar's test if every task that changes does so by the same number of attempts."""
    from scipy.special import bdtr

    size = max(1 / attempts, sqrt(discordance))
    share = min(1.0, discordance / size**2)
    gained = min(1.0, (1 + difference / size / share) / 2)
    power = 0.0
    for n in range(n_tasks + 1):
        if (max_lost := _max_lost(n, alpha)) >= 0:
            # Significant if at most `max_lost` of the n changed tasks go the other way.
            found = bdtr(max_lost, n, 1 - gained) + bdtr(max_lost, n, gained)
            power += comb(n_tasks, n) * share**n * (1 - share) ** (n_tasks - n) * float(found)
    return power


@lru_cache
def _max_lost(n: int, alpha: float) -> int:
    """The most losses among n changes that are still significant; -1 if none. `(6, 0.05)` gives 0."""
    return max(
        (lost for lost in range(n // 2) if mcnemar_exact(n - lost, lost) < alpha), default=-1
    )
