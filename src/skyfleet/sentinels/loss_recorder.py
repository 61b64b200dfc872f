"""LossWitness: stands around the loss and its KL term and remembers what they were given."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from skyfleet.algorithms.kl import KlEstimator
from skyfleet.algorithms.losses.loss import LossInputs, LossOutput, PolicyLoss, sequence_sum
from skyfleet.learner.single import LearnerSettings


@dataclass(slots=True)
class SeenLoss:
    """What the loss saw in one step, a tensor for each call."""

    logprobs: list[Tensor] = field(default_factory=list)
    """The learner's."""
    behaviour: list[Tensor] = field(default_factory=list)
    """The engine's."""
    advantages: list[Tensor] = field(default_factory=list)
    lengths: list[Tensor] = field(default_factory=list)
    reference: list[Tensor] = field(default_factory=list)
    """The reference's, where there is a KL term."""
    without_gradient: set[str] = field(default_factory=set)
    """Terms from which nothing is learned."""

    @property
    def n_tokens(self) -> int:
        return sum(map(len, self.logprobs))

    @property
    def n_sequences(self) -> int:
        return sum(map(len, self.lengths))

    def credit(self) -> tuple[float, float, float]:
        """The sum of the advantages, of their sizes, and of each sequence's times its engine logprob."""
        if not self.lengths:
            return 0.0, 0.0, 0.0
        lengths_B = torch.cat(self.lengths)
        advantages_B = sequence_sum(torch.cat(self.advantages).double(), lengths_B)
        behaviour_B = sequence_sum(torch.cat(self.behaviour).double(), lengths_B)
        sums = [advantages_B.sum(), advantages_B.abs().sum(), advantages_B @ behaviour_B]
        total, size, product = torch.stack(sums).tolist()
        return total, size, product


class LossRecorder:
    def __init__(self) -> None:
        self._seen = SeenLoss()

    def watched(self, settings: LearnerSettings) -> LearnerSettings:
        """The same settings, seen through."""
        kl = settings.kl
        return replace(
            settings,
            policy_loss=self._watched_loss(settings.policy_loss),
            kl=None if kl is None else self._watched_kl(kl),
        )

    def testify(self) -> SeenLoss:
        """What was seen since the last time."""
        seen, self._seen = self._seen, SeenLoss()
        return seen

    def _watched_loss(self, policy_loss: PolicyLoss) -> PolicyLoss:
        def watched(inputs: LossInputs) -> LossOutput:
            output = policy_loss(inputs)
            self._seen.logprobs.append(inputs.logprobs_T.detach())
            self._seen.behaviour.append(inputs.behaviour_logprobs_T)
            self._seen.advantages.append(inputs.advantages_T)
            self._seen.lengths.append(inputs.lengths_B)
            if not output.loss_T.requires_grad:
                self._seen.without_gradient.add("policy loss")
            return output

        return watched

    def _watched_kl(self, kl: KlEstimator) -> KlEstimator:
        def watched(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
            kl_T = kl(logprobs_T, ref_logprobs_T)
            self._seen.reference.append(ref_logprobs_T)
            if not kl_T.requires_grad:
                self._seen.without_gradient.add("KL")
            return kl_T

        return watched
