"""clip_cov and kl_cov: preserve entropy by restraining the tokens of highest covariance.

arXiv 2505.22617. Entropy falls with the covariance of logprob and advantage, and few tokens carry
most of it. A `Selector` picks them from a whole mini-batch. It uses the advantages as the estimator
computed them: the thresholds would mean nothing after a reduction has scaled them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING
from zlib import crc32

from skyfleet.algorithms.losses.loss import LossInputs, LossOutput, PolicyLoss, ratio
from skyfleet.algorithms.losses.ppo import CLIP_KEYS, NEVER_CLIPPED, clip_range, ppo_clip
from skyfleet.config.algorithm import Algorithm

if TYPE_CHECKING:
    from torch import Tensor

ROUNDING = 1e-5
"""Largest difference of two float32 logprobs that are equal up to rounding."""


def covariances(inputs: LossInputs) -> Tensor:
    """The contribution of each token to the covariance of logprob and advantage."""
    logprobs_T = inputs.logprobs_T.detach()
    advantages_T = inputs.advantages_T
    return (advantages_T - advantages_T.mean()) * (logprobs_T - logprobs_T.mean())


def select_clip_cov(
    inputs: LossInputs,
    *,
    clip_ratio: float,
    clip_cov_lb: float,
    clip_cov_ub: float,
    eps_clip_low: float,
    eps_clip_high: float,
) -> Tensor:
    """A random few of the tokens with a covariance between the bounds that PPO does not clip."""
    import torch

    plain = ppo_clip(inputs, eps_clip_low=eps_clip_low, eps_clip_high=eps_clip_high)
    cov_T = covariances(inputs)
    inside_T = (cov_T > clip_cov_lb) & (cov_T < clip_cov_ub)
    candidates_T = (inside_T & (plain.metrics_T["ppo_clip_ratio"] == 0)).cpu()
    n_selected = max(int(clip_ratio * len(cov_T)), 1)
    # Seeded by the token ids, which have no rounding: the same mini-batch, resumed or split
    # differently, selects the same. Shuffling all tokens keeps the draw independent of candidates.
    generator = torch.Generator().manual_seed(crc32(inputs.tokens_T.cpu().numpy().tobytes()))
    shuffled = torch.randperm(len(cov_T), generator=generator)
    picked = shuffled[candidates_T[shuffled]][:n_selected]
    selected_T = torch.zeros(len(cov_T), dtype=torch.bool)
    selected_T[picked] = True
    return selected_T.to(cov_T.device)


def clip_cov(inputs: LossInputs, *, eps_clip_low: float, eps_clip_high: float) -> LossOutput:
    """PPO's loss, 0 for selected tokens."""
    assert inputs.selected_T is not None
    plain = ppo_clip(inputs, eps_clip_low=eps_clip_low, eps_clip_high=eps_clip_high)
    left_out_T = inputs.selected_T.float()
    return LossOutput(
        loss_T=plain.loss_T * (1 - left_out_T),
        metrics_T={**plain.metrics_T, "clip_cov_ratio": left_out_T},
    )


CLIP_COV = PolicyLoss(
    name="clip_cov",
    build=lambda algorithm: partial(clip_cov, **clip_range(algorithm)),
    build_selector=lambda algorithm: partial(
        select_clip_cov, **algorithm.clip_cov.model_dump(), **clip_range(algorithm)
    ),
    reads=(*CLIP_KEYS, "algorithm.clip_cov"),
    metrics=("ppo_clip_ratio", "clip_cov_ratio"),
    filter_metrics=("clip_cov_ratio",),
    constant_metrics=NEVER_CLIPPED,
)


def select_kl_cov(inputs: LossInputs, *, kl_cov_frac: float) -> Tensor:
    """The tokens of highest covariance."""
    import torch

    cov_T = covariances(inputs)
    selected_T = torch.zeros_like(cov_T, dtype=torch.bool)
    selected_T[cov_T.topk(max(int(kl_cov_frac * len(cov_T)), 1)).indices] = True
    return selected_T


def kl_cov(inputs: LossInputs, *, ppo_kl_coef: float) -> LossOutput:
    """-rA, plus coef * |log r| for selected tokens; the reduction weights both alike.

    A token that has not moved has no penalty: the gradient of |log r| is a sign, and with one
    update per batch that sign would be rounding noise.
    """
    assert inputs.selected_T is not None
    moved_T = (inputs.logprobs_T - inputs.old_logprobs_T).abs()
    moved_T = moved_T.where(moved_T > ROUNDING, 0.0)
    held_T = inputs.selected_T.float()
    ratio_T = ratio(inputs.logprobs_T, inputs.old_logprobs_T)
    return LossOutput(
        loss_T=-ratio_T * inputs.advantages_T + ppo_kl_coef * moved_T * held_T,
        metrics_T={"kl_cov_ratio": held_T},
    )


def _constant_kl_cov_ratio(algorithm: Algorithm) -> dict[str, str]:
    return {
        "kl_cov_ratio": f"stays near {algorithm.kl_cov.kl_cov_frac:g} and restrains nothing: with "
        "one update per batch no token has moved, so the penalty is 0. Lower "
        "trainer.policy_mini_batch_size for it"
    }


KL_COV = PolicyLoss(
    name="kl_cov",
    build=lambda algorithm: partial(kl_cov, ppo_kl_coef=algorithm.kl_cov.ppo_kl_coef),
    build_selector=lambda algorithm: partial(
        select_kl_cov, kl_cov_frac=algorithm.kl_cov.kl_cov_frac
    ),
    reads=("algorithm.kl_cov",),
    metrics=("kl_cov_ratio",),
    # The gradient of its penalty is a sign, which has full size however small the difference is.
    recomputes_old_logprobs=True,
    constant_metrics=_constant_kl_cov_ratio,
)
