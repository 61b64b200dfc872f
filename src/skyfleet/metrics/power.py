"""Power: how much could a comparison have seen, and how many tasks would it take?"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, comb, inf, sqrt
from statistics import NormalDist

from skyfleet.metrics.significance import mcnemar_exact

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
