"""Advantages: the rewards of one group -> one number per attempt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, stdev

from skyfleet.errors import ConfigError

Estimator = Callable[[Sequence[float]], list[float]]


def grpo(rewards: Sequence[float], *, norm_by_std: bool = True) -> list[float]:
    """How far each attempt lies above the group's mean, in sample deviations.

    `grpo([1, 0, 0, 0])` is about `[1.5, -0.5, -0.5, -0.5]`. A group of one has nothing to be
    compared with: zero, not its raw score.
    """
    if len(rewards) < 2:
        return [0.0] * len(rewards)
    mean = fmean(rewards)
    scale = stdev(rewards) + 1e-6 if norm_by_std else 1.0
    return [(reward - mean) / scale for reward in rewards]


def rloo(rewards: Sequence[float]) -> list[float]:
    """Each attempt against the mean of the others. `rloo([1, 0, 0])` is `[1.0, -0.5, -0.5]`."""
    n, total = len(rewards), sum(rewards)
    if n < 2:
        return [0.0] * n
    return [reward - (total - reward) / (n - 1) for reward in rewards]


ESTIMATORS: dict[str, Estimator] = {"grpo": grpo, "rloo": rloo}


def estimator(name: str) -> Estimator:
    try:
        return ESTIMATORS[name]
    except KeyError:
        raise ConfigError(
            f"trainer.algorithm.advantage_estimator={name!r}; choose from {sorted(ESTIMATORS)}"
        ) from None
