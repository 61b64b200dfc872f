"""clip_cov and kl_cov: keep the entropy by holding back the tokens that cost most of it.

arXiv 2505.22617. Entropy falls with the covariance of logprob and advantage, and few tokens carry
most of it. Which they are is said of a whole mini-batch, by a `Selector`, and of the advantages as
the estimator gave them: the thresholds mean nothing after a reduction has scaled them.
"""

from __future__ import annotations

from zlib import crc32

import torch
from torch import Tensor

from skyfleet.algorithms.losses.loss import LossInputs, LossOutput, ratio
from skyfleet.algorithms.losses.ppo import ppo_clip

ROUNDING = 1e-5
"""How far apart two logprobs may be that would be equal without rounding, in float32."""


def covariances(inputs: LossInputs) -> Tensor:
    """What each token adds to the covariance of logprob and advantage."""
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
    """A random few of the tokens whose covariance is between the bounds and which PPO does not clip."""
    plain = ppo_clip(inputs, eps_clip_low=eps_clip_low, eps_clip_high=eps_clip_high)
    cov_T = covariances(inputs)
    inside_T = (cov_T > clip_cov_lb) & (cov_T < clip_cov_ub)
    candidates_T = (inside_T & (plain.metrics_T["ppo_clip_ratio"] == 0)).cpu()
    wanted = max(int(clip_ratio * len(cov_T)), 1)
    # Seeded by the tokens, of which nothing is rounded: the same mini-batch, resumed or cut
    # otherwise, draws the same. All tokens are shuffled: one candidate more moves no other.
    draw = torch.Generator().manual_seed(crc32(inputs.tokens_T.cpu().numpy().tobytes()))
    shuffled = torch.randperm(len(cov_T), generator=draw)
    picked = shuffled[candidates_T[shuffled]][:wanted]
    selected_T = torch.zeros(len(cov_T), dtype=torch.bool)
    selected_T[picked] = True
    return selected_T.to(cov_T.device)


def clip_cov(inputs: LossInputs, *, eps_clip_low: float, eps_clip_high: float) -> LossOutput:
    """PPO's; a selected token says nothing."""
    assert inputs.selected_T is not None
    plain = ppo_clip(inputs, eps_clip_low=eps_clip_low, eps_clip_high=eps_clip_high)
    left_out_T = inputs.selected_T.float()
    return LossOutput(
        loss_T=plain.loss_T * (1 - left_out_T),
        metrics_T={**plain.metrics_T, "clip_cov_ratio": left_out_T},
    )


def select_kl_cov(inputs: LossInputs, *, kl_cov_frac: float) -> Tensor:
    """The tokens of highest covariance."""
    cov_T = covariances(inputs)
    selected_T = torch.zeros_like(cov_T, dtype=torch.bool)
    selected_T[cov_T.topk(max(int(kl_cov_frac * len(cov_T)), 1)).indices] = True
    return selected_T


def kl_cov(inputs: LossInputs, *, ppo_kl_coef: float) -> LossOutput:
    """-rA, and for a selected token what it costs to move; both weigh what the token weighs.

    A token that has not moved costs nothing and is not pushed: the gradient of a size is its sign,
    and with one update a batch that sign is all rounding.
    """
    assert inputs.selected_T is not None
    moved_T = (inputs.logprobs_T - inputs.old_logprobs_T).abs()
    moved_T = torch.where(moved_T > ROUNDING, moved_T, 0.0)
    held_T = inputs.selected_T.float()
    ratio_T = ratio(inputs.logprobs_T, inputs.old_logprobs_T)
    return LossOutput(
        loss_T=-ratio_T * inputs.advantages_T + ppo_kl_coef * moved_T * held_T,
        metrics_T={"kl_cov_ratio": held_T},
    )
