"""CISPO: the ratio is clamped and weighs; no token loses its gradient."""

from __future__ import annotations

from typing import Literal

from skyfleet.algorithms.losses.loss import LossInputs, LossOutput
from skyfleet.algorithms.losses.ratios import ratio


def cispo(
    inputs: LossInputs,
    *,
    cispo_eps_clip_low: float,
    cispo_eps_clip_high: float,
    cispo_anchor: Literal["old", "rollout"],
) -> LossOutput:
    """-A clamp(r) log p, without gradient through the ratio (arXiv 2506.13585)."""
    on_rollout = cispo_anchor == "rollout"
    anchor_T = inputs.behaviour_logprobs_T if on_rollout else inputs.old_logprobs_T
    ratio_T = ratio(inputs.logprobs_T.detach(), anchor_T)
    clamped_T = ratio_T.clamp(1 - cispo_eps_clip_low, 1 + cispo_eps_clip_high)
    return LossOutput(
        loss_T=-inputs.advantages_T * clamped_T * inputs.logprobs_T,
        metrics_T={
            "ppo_clip_ratio": (clamped_T != ratio_T).float(),
            "cispo_ratio_clamped_mean": clamped_T,
        },
        spreads_T={"cispo_ratio": ratio_T},
    )
