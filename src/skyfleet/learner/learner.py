"""Learner: samples in, new weights out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from skyfleet.algorithms.sample import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    policy_version: int
    metrics: Mapping[str, float]
    credited: Sequence[Sample] = ()
    """What was learnt from, where the learner gave the credit itself: KL in reward, or a critic."""


class Learner(Protocol):
    policy_version: int

    async def step(self, samples: Sequence[Sample]) -> StepReport:
        """Improve the policy on one batch of credited samples."""
        ...

    async def imitate(self, samples: Sequence[Sample]) -> StepReport:
        """One supervised step on demonstrations."""
        ...

    def renew_reference(self) -> None:
        """The reference is what has just been saved as it."""
        ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...
