"""Finding: what a sentinel saw. Sentinel: who looks, at which hop, and how grave it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from skyfleet.errors import SentinelError

Evidence = Mapping[str, float | str]
HopT = TypeVar("HopT")


@dataclass(frozen=True, slots=True)
class Finding:
    sentence: str
    evidence: Evidence


def found(sentence: str, **evidence: float | str) -> Finding:
    return Finding(sentence, evidence)


@dataclass(frozen=True, slots=True)
class Sentinel(Generic[HopT]):
    hop: type[HopT]
    look: Callable[[HopT], Finding | None]
    """Named after what it watches; None says that all is well."""
    promise: bool = True
    """What must never be broken. A sign, which is not one, has innocent causes too and only warns."""
    error: type[SentinelError] = SentinelError
    """What stops the run."""

    @property
    def name(self) -> str:
        return self.look.__name__
