"""KL: how far the policy has moved from its reference, per token, with gradient; and how much
that costs."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from skyfleet.errors import ConfigError

KlEstimator = Callable[[Tensor, Tensor], Tensor]

KlControl = Callable[[float, float, int], float]
"""Coefficient, mean KL of a batch, its sequences -> the next coefficient."""


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


def kl_estimator(name: str) -> KlEstimator:
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
    """Raised while the KL is above its target, lowered while below (arXiv 1909.08593)."""
    error = min(max(kl / kl_target - 1, -0.2), 0.2)
    return coef * (1 + error * n_sequences / horizon)
