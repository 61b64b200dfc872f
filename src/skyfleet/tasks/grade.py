"""Grade: the result of a verifier. Imports only the standard library, because the jail uses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    reward: float
    success: bool
    parts: Mapping[str, float] = field(default_factory=dict)
    """The reward's components."""
    explanation: str = ""
    """The verifier's output, for people."""
