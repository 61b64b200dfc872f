"""A policy loss and an estimator of one's own, named in the configuration and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from skyfleet.algorithms.losses.loss import LossInputs, LossOutput, ratio


def smooth_clip(inputs: LossInputs, *, width: float = 0.2) -> LossOutput:
    """-A(1 + w tanh((r - 1) / w)): like PPO's near a ratio of 1, flat beyond, without a corner."""
    ratio_T = ratio(inputs.logprobs_T, inputs.old_logprobs_T)
    bent_T = 1 + width * torch.tanh((ratio_T - 1) / width)
    return LossOutput(
        loss_T=-inputs.advantages_T * bent_T,
        metrics_T={"smooth_clip_ratio": ((ratio_T - 1).abs() > width).float()},
    )


def against_the_best(rewards: Sequence[float]) -> list[float]:
    """Each attempt against the best of the others: only a new best gains anything.

    `against_the_best([1.0, 0.5, 0.0])` is `[0.5, -0.5, -1.0]`. No attempt sets its own bar, so the
    gradient is unbiased, as with RLOO.
    """
    others = ([*rewards[:i], *rewards[i + 1 :]] for i in range(len(rewards)))
    return [
        reward - max(other, default=reward) for reward, other in zip(rewards, others, strict=True)
    ]
