"""DPPO: the trust region is a distance of probabilities, not a ratio."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from skyfleet.algorithms.losses.loss import LossInputs, LossOutput
from skyfleet.algorithms.losses.ratios import ratio


def dppo(
    inputs: LossInputs,
    *,
    dppo_type: Literal["binary_tv", "binary_kl"],
    delta_low: float,
    delta_high: float,
) -> LossOutput:
    """-rA while the token's own probability is near what it was sampled with (arXiv 2602.04879).

    The distance is that of a token against all the others together, as total variation or as KL.
    """
    logprobs_T, sampled_T = inputs.logprobs_T.detach(), inputs.behaviour_logprobs_T
    p_T, mu_T = logprobs_T.exp(), sampled_T.exp()
    distance_T = (p_T - mu_T).abs() if dppo_type == "binary_tv" else _kl(logprobs_T, sampled_T)
    advantages_T = inputs.advantages_T
    too_likely_T = (advantages_T > 0) & (p_T > mu_T) & (distance_T > delta_high)
    too_rare_T = (advantages_T < 0) & (p_T < mu_T) & (distance_T > delta_low)
    dropped_T = (too_likely_T | too_rare_T).float()
    ratio_T = ratio(inputs.logprobs_T, sampled_T)
    return LossOutput(
        loss_T=-ratio_T * advantages_T * (1 - dropped_T), metrics_T={"ppo_clip_ratio": dropped_T}
    )


def _kl(logprobs_T: Tensor, sampled_T: Tensor) -> Tensor:
    p_T, mu_T = logprobs_T.exp(), sampled_T.exp()
    others_T = ((1 - mu_T + 1e-8) / (1 - p_T + 1e-8)).log()
    return mu_T * (sampled_T - logprobs_T) + (1 - mu_T) * others_T
