"""Grade: how well a task was done, with its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    reward: float
    success: bool
    parts: Mapping[str, float] = field(default_factory=dict)
    """What the reward is made of."""
    explanation: str = ""
    """What the verifier said, for a person."""
