"""PPO's clipped loss, SkyRL's `regular`."""

from __future__ import annotations

import torch

from skyfleet.algorithms.losses.loss import LossInputs, LossOutput


def ppo_clip(inputs: LossInputs, *, eps_clip_low: float, eps_clip_high: float) -> LossOutput:
    """-min(rA, clip(r)A) of arXiv 1707.06347, with a lower and an upper clip of their own."""
    log_ratio_T = (inputs.logprobs_T - inputs.behaviour_logprobs_T).float().clamp(-20, 20)
    ratio_T = log_ratio_T.exp()
    free_T = -ratio_T * inputs.advantages_T
    clipped_T = -ratio_T.clamp(1 - eps_clip_low, 1 + eps_clip_high) * inputs.advantages_T
    return LossOutput(
        loss_T=torch.maximum(free_T, clipped_T),
        metrics_T={"ppo_clip_ratio": (clipped_T > free_T).float()},
    )
