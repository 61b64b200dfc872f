"""Importance-weighted policy gradients, without PPO's clip."""

from __future__ import annotations

from skyfleet.algorithms.losses.loss import LossInputs, LossOutput
from skyfleet.algorithms.losses.ratios import ratio


def importance_sampling(inputs: LossInputs) -> LossOutput:
    """-rA, as Tinker's loss of that name (https://tinker-docs.thinkingmachines.ai/losses)."""
    ratio_T = (inputs.logprobs_T - inputs.old_logprobs_T).float().exp()
    return LossOutput(
        loss_T=-ratio_T * inputs.advantages_T, metrics_T={"importance_ratio": ratio_T.detach()}
    )


def rollout_is(inputs: LossInputs, *, eps_clip_low: float, eps_clip_high: float) -> LossOutput:
    """-rA log p, the ratio to the engine's own logprobs; a token outside the bounds says nothing."""
    ratio_T = ratio(inputs.logprobs_T.detach(), inputs.behaviour_logprobs_T)
    kept_T = ((ratio_T > 1 - eps_clip_low) & (ratio_T < 1 + eps_clip_high)).float()
    return LossOutput(
        loss_T=-ratio_T * kept_T * inputs.advantages_T * inputs.logprobs_T,
        metrics_T={"ppo_clip_ratio": 1 - kept_T},
    )
