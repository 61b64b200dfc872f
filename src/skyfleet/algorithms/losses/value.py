"""The critic's loss: how far a value is from what followed, not too far from what it was."""

from __future__ import annotations

from torch import Tensor

from skyfleet.algorithms.losses.loss import LossOutput


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
