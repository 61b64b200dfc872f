"""Grade: the result of a verifier. Imports only the standard library, because the jail uses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """The result of a verifier: a reward, and whether the task was solved.

    A reward function can return a `Grade` instead of a number, for example to give partial credit
    that does not count as a success:

    >>> import skyfleet as sf
    >>> def reward(task, answer):
    ...     solved = answer.strip() == task["answer"]
    ...     return sf.Grade(reward=1.0 if solved else 0.1, success=solved, explanation=answer)
    >>> sf.rollout("null", reward=reward, task={"prompt": "2 + 2?", "answer": "4"}).grade.success
    False
    """

    reward: float
    success: bool
    parts: Mapping[str, float] = field(default_factory=dict)
    """The reward's components."""
    explanation: str = ""
    """The verifier's output, for people."""
