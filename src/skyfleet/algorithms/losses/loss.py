"""The interface of a policy loss: its inputs, its output and the ratios every loss needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The chosen tokens of whole sequences, one entry each; what the policy was given is not here."""

    tokens_T: Tensor
    logprobs_T: Tensor
    """Under the weights being trained; carries the gradient."""
    old_logprobs_T: Tensor
    """Under the policy as the step began: how far it may go is measured from there."""
    behaviour_logprobs_T: Tensor
    """Under the policy that sampled, as the engine told them."""
    advantages_T: Tensor
    """As the estimator gave them: what a token weighs in the mini-batch is applied afterwards."""
    lengths_B: Tensor
    """How many of the tokens are each sequence's; sequences stand one after another."""
    selected_T: Tensor | None = None
    """What the loss's `Selector` said of each token, if it has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    loss_T: Tensor
    """Per token; the learner weighs and sums."""
    metrics_T: dict[str, Tensor] = field(default_factory=dict)
    """Name -> a value per token, averaged over all chosen tokens."""
    metrics_B: dict[str, Tensor] = field(default_factory=dict)
    """Name -> a value per sequence, averaged over all sequences."""
    spreads_T: dict[str, Tensor] = field(default_factory=dict)
    """Name -> a value per token, of which `_mean`, `_std`, `_max` and `_min` are told."""


PolicyLoss = Callable[[LossInputs], LossOutput]

Selector = Callable[[LossInputs], Tensor]
"""Which tokens of a whole mini-batch are treated apart, for a loss that compares all of them."""


def log_ratio(logprobs_T: Tensor, others_T: Tensor) -> Tensor:
    """Within ±20: a ratio is finite, however far a policy went."""
    return (logprobs_T - others_T).float().clamp(-20, 20)


def ratio(logprobs_T: Tensor, others_T: Tensor) -> Tensor:
    return log_ratio(logprobs_T, others_T).exp()


def sequence_sum(values_T: Tensor, lengths_B: Tensor) -> Tensor:
    """One sum a sequence, added up in the same order every time."""
    return torch.segment_reduce(values_T, "sum", lengths=lengths_B)


def by_token(values_B: Tensor, lengths_B: Tensor) -> Tensor:
    """A sequence's value on each of its tokens."""
    return values_B.repeat_interleave(lengths_B)
