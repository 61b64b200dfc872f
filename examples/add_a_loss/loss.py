"""A user's policy loss and advantage estimator, which the configuration names."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from skyfleet.algorithms.losses.loss import LossInputs, LossOutput, ratio


def smooth_clip(inputs: LossInputs, *, width: float = 0.2) -> LossOutput:
    """-A(1 + w tanh((r - 1) / w)): like PPO's near a ratio of 1, flat beyond, without a corner."""
    ratio_T = ratio(inputs.logprobs_T, inputs.old_logprobs_T)
    smooth_T = 1 + width * torch.tanh((ratio_T - 1) / width)
    return LossOutput(
        loss_T=-inputs.advantages_T * smooth_T,
        metrics_T={"smooth_clip_ratio": ((ratio_T - 1).abs() > width).float()},
    )


def compare_with_best(rewards: Sequence[float]) -> list[float]:
    """The reward minus the best reward of the other attempts: only a new best gains.

    `compare_with_best([1.0, 0.5, 0.0])` is `[0.5, -0.5, -1.0]`. No attempt is in its own baseline, so
    the gradient is unbiased, as with RLOO.
    """
    others = ([*rewards[:i], *rewards[i + 1 :]] for i in range(len(rewards)))
    return [
        reward - max(other, default=reward) for reward, other in zip(rewards, others, strict=True)
    ]
