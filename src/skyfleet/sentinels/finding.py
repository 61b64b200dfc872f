"""Finding: what a check found. Sentinel: a check of one stage of a step, and how severe it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from skyfleet.errors import SentinelError

Evidence = Mapping[str, float | str]
StageT = TypeVar("StageT")


@dataclass(frozen=True, slots=True)
class Finding:
    sentence: str
    evidence: Evidence


def found(sentence: str, **evidence: float | str) -> Finding:
    return Finding(sentence, evidence)


@dataclass(frozen=True, slots=True)
class Sentinel(Generic[StageT]):
    stage: type[StageT]
    check: Callable[[StageT], Finding | None]
    """Its function name is the name of the sentinel; None means that it found nothing."""
    is_invariant: bool = True
    """An invariant must always hold. A warning can have harmless causes and does not stop a run."""
    error: type[SentinelError] = SentinelError
    """Raised when it stops the run."""

    @property
    def name(self) -> str:
        return self.check.__name__
