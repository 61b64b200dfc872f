"""Limits: what one episode may use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    max_turns: int
    max_input_length: int
    """Tokens; a turn whose prompt is longer is not begun."""
    trajectory_timeout_seconds: float
    """From opening to the last turn, and again for the grade; 0 switches it off."""

    @property
    def seconds_or_none(self) -> float | None:
        return self.trajectory_timeout_seconds or None
