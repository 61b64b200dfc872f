"""What a policy loss is given and what it gives back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The chosen tokens of a micro-batch, one entry each; what the policy was given is not here."""

    logprobs_T: Tensor
    """Under the weights being trained; carries the gradient."""
    behaviour_logprobs_T: Tensor
    """Under the policy that sampled."""
    advantages_T: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    loss_T: Tensor
    """Per token; the learner weighs and sums."""
    metrics_T: dict[str, Tensor] = field(default_factory=dict)
    """Name -> a value per token, averaged over all chosen tokens."""


PolicyLoss = Callable[[LossInputs], LossOutput]
