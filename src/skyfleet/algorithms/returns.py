"""Returns: the rewards along a sequence -> what each of its tokens was worth."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def discounted(rewards_T: Sequence[float], *, gamma: float) -> list[float]:
    """What follows each token, nearer rewards counting more. `discounted([0, 1], gamma=0.5)` is
    `[0.5, 1.0]`."""
    return list(accumulate(reversed(rewards_T), lambda after, now: now + gamma * after))[::-1]


def gae(
    rewards_T: Sequence[float], values_T: Sequence[float], *, gamma: float, lambd: float
) -> tuple[list[float], list[float]]:
    """Advantages and a critic's targets (arXiv 1506.02438).

    The sequence holds what the policy chose and nothing else: an observation is no action, so
    neither the discount nor the recursion runs over it.
    """
    following = [*values_T[1:], 0.0]
    surprises = [
        reward + gamma * after - value
        for reward, value, after in zip(rewards_T, values_T, following, strict=True)
    ]
    advantages = discounted(surprises, gamma=gamma * lambd)
    targets = [a + value for a, value in zip(advantages, values_T, strict=True)]
    return advantages, targets


def whitened(values_N: Sequence[float]) -> Floats:
    """Mean 0 and sample deviation 1 over all of them; fewer than two say nothing: zeros."""
    values = np.asarray(values_N, np.float64)
    if len(values) < 2:
        return np.zeros_like(values)
    whole: Floats = (values - values.mean()) / np.sqrt(values.var(ddof=1) + 1e-8)
    return whole


def standardized(values_N: Sequence[float]) -> Floats:
    """Mean 0 and population deviation 1 over all of them (`advantage_batch_normalize`)."""
    values = np.asarray(values_N, np.float64)
    if not len(values):
        return values
    whole: Floats = (values - values.mean()) / np.sqrt(max(values.var(), 1e-8))
    return whole
