"""SAPO: a gate that closes softly where PPO's clip falls shut."""

from __future__ import annotations

import torch

from skyfleet.algorithms.losses.loss import LossInputs, LossOutput
from skyfleet.algorithms.losses.ratios import ratio


def sapo(inputs: LossInputs, *, tau_pos: float, tau_neg: float) -> LossOutput:
    """-A (4/tau) sigmoid(tau (r - 1)) of arXiv 2511.20347, tau by the sign of the advantage."""
    ratio_T = ratio(inputs.logprobs_T, inputs.old_logprobs_T)
    tau_T = torch.where(inputs.advantages_T > 0, tau_pos, tau_neg)
    gate_T = torch.sigmoid(tau_T * (ratio_T - 1)) * 4 / tau_T
    return LossOutput(loss_T=-inputs.advantages_T * gate_T)
