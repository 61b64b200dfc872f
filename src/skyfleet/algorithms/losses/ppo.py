"""PPO's clipped policy loss and clipped value loss."""

from __future__ import annotations

import torch
from torch import Tensor

from skyfleet.algorithms.losses.loss import LossInputs, LossOutput, by_token, ratio, sequence_sum


def ppo_clip(inputs: LossInputs, *, eps_clip_low: float, eps_clip_high: float) -> LossOutput:
    """-min(rA, clip(r)A) of arXiv 1707.06347, with a lower and an upper clip of their own."""
    ratio_T = ratio(inputs.logprobs_T, inputs.old_logprobs_T)
    return _clipped(ratio_T, inputs.advantages_T, eps_clip_low, eps_clip_high)


def dual_clip(
    inputs: LossInputs, *, eps_clip_low: float, eps_clip_high: float, clip_ratio_c: float
) -> LossOutput:
    """PPO's, and at most -cA where the advantage is negative (arXiv 1912.09729)."""
    output = ppo_clip(inputs, eps_clip_low=eps_clip_low, eps_clip_high=eps_clip_high)
    bound_T = -clip_ratio_c * inputs.advantages_T
    bounded_T = torch.minimum(output.loss_T, bound_T)
    return LossOutput(
        loss_T=torch.where(inputs.advantages_T < 0, bounded_T, output.loss_T),
        metrics_T=output.metrics_T,
    )


def gspo(inputs: LossInputs, *, eps_clip_low: float, eps_clip_high: float) -> LossOutput:
    """PPO's with one ratio a sequence, the geometric mean of its tokens' (arXiv 2507.18071).

    The token variant: the value is the sequence's, the gradient the token's own.
    """
    own_T = inputs.logprobs_T.detach()
    totals_B = sequence_sum(own_T - inputs.old_logprobs_T, inputs.lengths_B)
    mean_T = by_token(totals_B / inputs.lengths_B.clamp(min=1), inputs.lengths_B)
    ratio_T = (inputs.logprobs_T - own_T + mean_T).clamp(max=10).exp()
    return _clipped(ratio_T, inputs.advantages_T, eps_clip_low, eps_clip_high)


def _clipped(ratio_T: Tensor, advantages_T: Tensor, low: float, high: float) -> LossOutput:
    free_T = -ratio_T * advantages_T
    clipped_T = -ratio_T.clamp(1 - low, 1 + high) * advantages_T
    return LossOutput(
        loss_T=torch.maximum(free_T, clipped_T),
        metrics_T={"ppo_clip_ratio": (clipped_T > free_T).float()},
    )


def value_loss(
    values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, *, value_clip: float | None
) -> LossOutput:
    """Half the squared error; with a clip, the worse of it and of the clipped value's.

    A value that has come `value_clip` nearer since the step began is held at that bound, which has
    no gradient (the clip of arXiv 1707.06347, for values).
    """
    error_T = (values_T - returns_T).square()
    if value_clip is None:
        return LossOutput(loss_T=error_T / 2)
    moved_T = (values_T - old_values_T).clamp(-value_clip, value_clip)
    clipped_T = (old_values_T + moved_T - returns_T).square()
    decides_T = (clipped_T > error_T).float()
    return LossOutput(
        loss_T=error_T.maximum(clipped_T) / 2, metrics_T={"values_clipfrac": decides_T}
    )
