"""A user's loss that fails when its test says so."""

from __future__ import annotations

from collections.abc import Callable

from examples.add_a_loss.loss import smooth_clip

from skyfleet.algorithms.losses.loss import LossInputs, LossOutput

must_fail: Callable[[], bool] = bool


def fail_sometimes(inputs: LossInputs) -> LossOutput:
    if must_fail():
        raise ZeroDivisionError("the loss divides by zero")
    return smooth_clip(inputs)
