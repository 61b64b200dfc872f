"""KL: how far the policy has moved from its reference, per token, with gradient."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from skyfleet.errors import ConfigError

KlEstimator = Callable[[Tensor, Tensor], Tensor]


def k1(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    return logprobs_T - ref_logprobs_T


def k2(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    return 0.5 * (logprobs_T - ref_logprobs_T).square()


def k3(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """k3 of http://joschu.net/blog/kl-approx.html: unbiased, non-negative; clamped as SkyRL does."""
    log_ratio_T = (ref_logprobs_T - logprobs_T).clamp(-20, 20)
    return (log_ratio_T.exp() - log_ratio_T - 1).clamp(-10, 10)


KL_ESTIMATORS: dict[str, KlEstimator] = {"k1": k1, "k2": k2, "k3": k3}


def kl_estimator(name: str) -> KlEstimator:
    try:
        return KL_ESTIMATORS[name]
    except KeyError:
        raise ConfigError(
            f"trainer.algorithm.kl_estimator_type={name!r}; choose from {sorted(KL_ESTIMATORS)}"
        ) from None
