"""Rewards: what a function of yours gives, as a grade."""

from __future__ import annotations

from skyfleet.envs.given import is_finite
from skyfleet.envs.verifiers.running import SUCCESS_REWARD
from skyfleet.errors import VerifierError
from skyfleet.tasks.grade import Grade

Reward = float | Grade | None
"""None: it could not be judged."""


def grade_from(result: Reward, *, by: str) -> Grade | None:
    """`by` names who gave it, for who has to mend it."""
    if result is None:
        return None
    reward = result.reward if isinstance(result, Grade) else result
    if not is_finite(reward):
        raise VerifierError(
            f"{by} gave {result!r:.200}; give a finite number, a Grade with one, or None"
        )
    if isinstance(result, Grade):
        return result
    return Grade(reward=float(reward), success=bool(reward >= SUCCESS_REWARD))
