"""PPO's clipped policy loss, its variants dual_clip and gspo, and the clipped value loss."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, TypedDict

from skyfleet.algorithms.losses.loss import (
    LOSS_KEY,
    LossInputs,
    LossOutput,
    PolicyLoss,
    expand_to_tokens,
    metrics_at_ratio_one,
    ratio,
    sequence_sum,
)
from skyfleet.config.algorithm import Algorithm
from skyfleet.config.root import RunConfig

if TYPE_CHECKING:
    from torch import Tensor

CLIP_KEYS = ("algorithm.eps_clip_low", "algorithm.eps_clip_high")
NEVER_CLIPPED = metrics_at_ratio_one({"ppo_clip_ratio": 0})


class ClipRange(TypedDict):
    eps_clip_low: float
    eps_clip_high: float


def clip_range(algorithm: Algorithm) -> ClipRange:
    return {"eps_clip_low": algorithm.eps_clip_low, "eps_clip_high": algorithm.eps_clip_high}


def ppo_clip(inputs: LossInputs, *, eps_clip_low: float, eps_clip_high: float) -> LossOutput:
    """-min(rA, clip(r)A) of arXiv 1707.06347, with separate lower and upper clips."""
    ratio_T = ratio(inputs.logprobs_T, inputs.old_logprobs_T)
    return _clip(ratio_T, inputs.advantages_T, eps_clip_low, eps_clip_high)


REGULAR = PolicyLoss(
    name="regular",
    build=lambda algorithm: partial(ppo_clip, **clip_range(algorithm)),
    reads=CLIP_KEYS,
    metrics=("ppo_clip_ratio",),
    constant_metrics=NEVER_CLIPPED,
)


def dual_clip(
    inputs: LossInputs, *, eps_clip_low: float, eps_clip_high: float, clip_ratio_c: float
) -> LossOutput:
    """PPO's loss, and at most -cA where the advantage is negative (arXiv 1912.09729)."""
    output = ppo_clip(inputs, eps_clip_low=eps_clip_low, eps_clip_high=eps_clip_high)
    bound_T = -clip_ratio_c * inputs.advantages_T
    bounded_T = output.loss_T.minimum(bound_T)
    return LossOutput(
        loss_T=bounded_T.where(inputs.advantages_T < 0, output.loss_T),
        metrics_T=output.metrics_T,
    )


DUAL_CLIP = PolicyLoss(
    name="dual_clip",
    build=lambda algorithm: partial(
        dual_clip, **clip_range(algorithm), clip_ratio_c=algorithm.clip_ratio_c
    ),
    reads=(*CLIP_KEYS, "algorithm.clip_ratio_c"),
    metrics=("ppo_clip_ratio",),
    constant_metrics=NEVER_CLIPPED,
)


def gspo(inputs: LossInputs, *, eps_clip_low: float, eps_clip_high: float) -> LossOutput:
    """PPO's loss with one ratio per sequence, the geometric mean over tokens (arXiv 2507.18071).

    The token variant: the value is the sequence's, the gradient the token's own.
    """
    own_T = inputs.logprobs_T.detach()
    totals_B = sequence_sum(own_T - inputs.old_logprobs_T, inputs.lengths_B)
    mean_T = expand_to_tokens(totals_B / inputs.lengths_B.clamp(min=1), inputs.lengths_B)
    ratio_T = (inputs.logprobs_T - own_T + mean_T).clamp(max=10).exp()
    return _clip(ratio_T, inputs.advantages_T, eps_clip_low, eps_clip_high)


def _warn_of_token_clip(config: RunConfig) -> Iterator[str]:
    """A mean over tokens moves far less than the ratio of a single token."""
    algorithm = config.trainer.algorithm
    low, high = algorithm.eps_clip_low, algorithm.eps_clip_high
    if max(low, high) >= 0.1:
        yield (
            f"{LOSS_KEY}=gspo with eps_clip_low={low} and eps_clip_high={high}: that range is for the "
            "ratio of a token, and the mean ratio of a sequence hardly ever leaves it; set "
            "eps_clip_low=3e-4 and eps_clip_high=4e-4, as in the GSPO paper"
        )


GSPO = PolicyLoss(
    name="gspo",
    build=lambda algorithm: partial(gspo, **clip_range(algorithm)),
    reads=CLIP_KEYS,
    metrics=("ppo_clip_ratio",),
    constant_metrics=NEVER_CLIPPED,
    warnings=_warn_of_token_clip,
)


def _clip(ratio_T: Tensor, advantages_T: Tensor, low: float, high: float) -> LossOutput:
    unclipped_T = -ratio_T * advantages_T
    clipped_T = -ratio_T.clamp(1 - low, 1 + high) * advantages_T
    return LossOutput(
        loss_T=unclipped_T.maximum(clipped_T),
        metrics_T={"ppo_clip_ratio": (clipped_T > unclipped_T).float()},
    )


def value_loss(
    values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, *, value_clip: float | None
) -> LossOutput:
    """Half the squared error; with a clip, the larger of it and the clipped value's error.

    A value that moved by `value_clip` since the start of the step is held at that bound, which has
    no gradient (the clip of arXiv 1707.06347, for values).
    """
    error_T = (values_T - returns_T).square()
    if value_clip is None:
        return LossOutput(loss_T=error_T / 2)
    moved_T = (values_T - old_values_T).clamp(-value_clip, value_clip)
    clipped_T = (old_values_T + moved_T - returns_T).square()
    is_clipped_T = (clipped_T > error_T).float()
    return LossOutput(
        loss_T=error_T.maximum(clipped_T) / 2, metrics_T={"values_clipfrac": is_clipped_T}
    )
