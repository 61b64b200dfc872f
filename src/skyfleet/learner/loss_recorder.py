"""LossRecorder: wraps the policy loss and the KL estimator and records their inputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from skyfleet.algorithms.kl import KlEstimator
from skyfleet.algorithms.losses.loss import LossFunction, LossInputs, LossOutput, sequence_sum
from skyfleet.learner.single_device import LearnerSettings


@dataclass(slots=True)
class LossRecord:
    """The inputs of the loss in one step, one tensor per call."""

    logprobs: list[Tensor] = field(default_factory=list)
    """The learner's."""
    behaviour_logprobs: list[Tensor] = field(default_factory=list)
    """The engine's."""
    advantages: list[Tensor] = field(default_factory=list)
    lengths: list[Tensor] = field(default_factory=list)
    reference_logprobs: list[Tensor] = field(default_factory=list)
    """The KL reference's, if there is a KL term."""
    without_gradient: set[str] = field(default_factory=set)
    """Terms of the loss that do not require grad."""

    @classmethod
    def join(cls, records: Iterable[LossRecord]) -> LossRecord:
        """Of several ranks, one after another."""
        joined = cls()
        for record in records:
            joined.extend(record)
        return joined

    def extend(self, other: LossRecord) -> None:
        for name in ("logprobs", "behaviour_logprobs", "advantages", "lengths"):
            getattr(self, name).extend(getattr(other, name))
        self.reference_logprobs += other.reference_logprobs
        self.without_gradient |= other.without_gradient

    def to_cpu(self) -> LossRecord:
        """For another process."""
        lists = ("logprobs", "behaviour_logprobs", "advantages", "lengths", "reference_logprobs")
        moved = {name: [x.cpu() for x in getattr(self, name)] for name in lists}
        return LossRecord(**moved, without_gradient=self.without_gradient)

    @property
    def n_tokens(self) -> int:
        return sum(map(len, self.logprobs))

    @property
    def n_sequences(self) -> int:
        return sum(map(len, self.lengths))

    def sum_advantages(self) -> tuple[float, float, float]:
        """Over sequences: the sum, the absolute sum, and the sum of products with engine logprobs."""
        if not self.lengths:
            return 0.0, 0.0, 0.0
        lengths_B = torch.cat(self.lengths)
        advantages_B = sequence_sum(torch.cat(self.advantages).double(), lengths_B)
        behaviour_B = sequence_sum(torch.cat(self.behaviour_logprobs).double(), lengths_B)
        sums = [advantages_B.sum(), advantages_B.abs().sum(), advantages_B @ behaviour_B]
        total, size, product = torch.stack(sums).tolist()
        return total, size, product


class LossRecorder:
    def __init__(self) -> None:
        self._record = LossRecord()

    def wrap_settings(self, settings: LearnerSettings) -> LearnerSettings:
        """The settings with a recording loss and a recording KL estimator."""
        kl = settings.kl
        return replace(
            settings,
            policy_loss=self._record_loss(settings.policy_loss),
            kl=None if kl is None else self._record_kl(kl),
        )

    def add(self, record: LossRecord) -> None:
        """What the loss got in another process."""
        self._record.extend(record)

    def drain(self) -> LossRecord:
        """What was recorded since the last call."""
        record, self._record = self._record, LossRecord()
        return record

    def _record_loss(self, policy_loss: LossFunction) -> LossFunction:
        def recording(inputs: LossInputs) -> LossOutput:
            output = policy_loss(inputs)
            self._record.logprobs.append(inputs.logprobs_T.detach())
            self._record.behaviour_logprobs.append(inputs.behaviour_logprobs_T)
            self._record.advantages.append(inputs.advantages_T)
            self._record.lengths.append(inputs.lengths_B)
            if not output.loss_T.requires_grad:
                self._record.without_gradient.add("policy loss")
            return output

        return recording

    def _record_kl(self, kl: KlEstimator) -> KlEstimator:
        def recording(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
            kl_T = kl(logprobs_T, ref_logprobs_T)
            self._record.reference_logprobs.append(ref_logprobs_T)
            if not kl_T.requires_grad:
                self._record.without_gradient.add("KL")
            return kl_T

        return recording
