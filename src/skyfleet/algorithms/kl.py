"""KL estimators, and KL as a penalty in the reward (`use_kl_in_reward`).

The KL loss term (`use_kl_loss`) enters the loss in `skyfleet.learner.single_device`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from torch import Tensor

from skyfleet.algorithms.sample import Sample
from skyfleet.errors import ConfigError

KlEstimator = Callable[[Tensor, Tensor], Tensor]

KlControl = Callable[[float, float, int], float]
"""Coefficient, mean KL of a batch, number of its sequences -> the next coefficient."""


def k1(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    return logprobs_T - ref_logprobs_T


def absolute(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    return (logprobs_T - ref_logprobs_T).abs()


def k2(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    return 0.5 * (logprobs_T - ref_logprobs_T).square()


def k3(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """k3 of http://joschu.net/blog/kl-approx.html: unbiased, non-negative; clamped as SkyRL does."""
    log_ratio_T = (ref_logprobs_T - logprobs_T).clamp(-20, 20)
    return (log_ratio_T.exp() - log_ratio_T - 1).clamp(-10, 10)


KL_ESTIMATORS: dict[str, KlEstimator] = {"k1": k1, "abs": absolute, "k2": k2, "k3": k3}


def get_kl_estimator(name: str) -> KlEstimator:
    try:
        return KL_ESTIMATORS[name]
    except KeyError:
        raise ConfigError(
            f"trainer.algorithm.kl_estimator_type={name!r}; choose from {sorted(KL_ESTIMATORS)}"
        ) from None


def fixed_control(coef: float, kl: float, n_sequences: int) -> float:
    return coef


def adaptive_control(
    coef: float, kl: float, n_sequences: int, *, kl_target: float, horizon: int
) -> float:
    """Raise the coefficient while the KL is above its target, lower it while below (arXiv 1909.08593)."""
    error = min(max(kl / kl_target - 1, -0.2), 0.2)
    return coef * (1 + error * n_sequences / horizon)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardKl:
    """The settings of KL in the reward."""

    estimate: KlEstimator
    coef: float
    """Initial coefficient."""
    control: KlControl
    compute_advantages: Callable[[Sequence[Sample]], list[Sample]]
    """Samples with penalties -> the same with advantages of the penalized rewards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KlPenalties:
    samples: list[Sample]
    kl: float
    """Mean over sequences of the mean over action tokens."""
    kl_max: float
    """Mean over sequences of the largest absolute value."""


def apply_kl_penalty(
    samples: Sequence[Sample],
    ref_logprobs: Sequence[Sequence[float]],
    estimate: KlEstimator,
    *,
    coef: float,
) -> KlPenalties:
    """Set the penalty of every action token to `coef` times its KL to the reference.

    `ref_logprobs` holds one logprob per action token.
    """
    with_penalties: list[Sample] = []
    means: list[float] = []
    peaks: list[float] = []
    for sample, reference in zip(samples, ref_logprobs, strict=True):
        own = sample.select_action_tokens(sample.old_logprobs or sample.logprobs)
        kl_T = estimate(torch.tensor(own), torch.tensor(reference))
        penalties = sample.scatter_to_tokens((max(coef, 0.0) * kl_T).tolist())
        with_penalties.append(replace(sample, penalties=penalties))
        means.append(float(kl_T.mean()))
        peaks.append(float(kl_T.abs().max()))
    return KlPenalties(samples=with_penalties, kl=fmean(means), kl_max=fmean(peaks))
