"""Cross-entropy: imitate the chosen tokens, whatever they earned."""

from __future__ import annotations

from skyfleet.algorithms.losses.loss import LossInputs, LossOutput


def cross_entropy(inputs: LossInputs) -> LossOutput:
    return LossOutput(loss_T=-inputs.logprobs_T)
