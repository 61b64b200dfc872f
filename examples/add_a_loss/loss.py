"""A policy loss and an estimator of one's own, named in the configuration and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from skyfleet.algorithms.losses.loss import LossInputs, LossOutput
from skyfleet.algorithms.losses.ratios import ratio


def smooth_clip(inputs: LossInputs, *, width: float = 0.2) -> LossOutput:
    """-A(1 + w tanh((r - 1) / w)): like PPO's near a ratio of 1, flat beyond, without a corner."""
    ratio_T = ratio(inputs.logprobs_T, inputs.old_logprobs_T)
    bent_T = 1 + width * torch.tanh((ratio_T - 1) / width)
    return LossOutput(
        loss_T=-inputs.advantages_T * bent_T,
        metrics_T={"smooth_clip_ratio": ((ratio_T - 1).abs() > width).float()},
    )


def against_the_best(rewards: Sequence[float]) -> list[float]:
    """An attempt is worth what it lacks to its group's best, plus what they lack on average."""
    best = max(rewards, default=0.0)
    lacking = [best - reward for reward in rewards]
    return [sum(lacking) / len(lacking) - lack for lack in lacking]
