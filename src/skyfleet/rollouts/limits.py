"""Limits: what one episode may use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    max_turns: int
    max_input_length: int
    """Tokens; a turn whose prompt is longer is not begun."""
    trajectory_timeout_seconds: float
    """0 switches it off."""
