"""FailureClass: why an episode did not pass, and Evidence: where it shows."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FailureClass(StrEnum):
    """One episode has one. They stand in the order in which tables show them."""

    FALSE_COMPLETION = "false completion"
    """It ended as finished, and the state or the answer is wrong."""
    GAVE_UP = "gave up"
    """It ended without trying, or said that it cannot."""
    LOOP = "loop or repetition"
    """Its last calls, or its last words, are the same again and again."""
    MALFORMED_CALL = "malformed call"
    """A call that cannot be read, or that names no tool."""
    WRONG_ARGUMENTS = "wrong arguments"
    """A tool refused what it was given: by its schema, or by a rule of its world."""
    NOT_FOUND = "not found"
    """A call named something that is not there."""
    UNAUTHORISED = "unauthorised"
    """Whoever acted may not do this."""
    LIMIT = "rate limit or time-out"
    """Too fast for a service, or too slow for its deadline or the episode's."""
    CONTEXT_OVERFLOW = "context overflow"
    """The tokens ran out: of the context, or of one answer."""
    OUT_OF_TURNS = "out of turns"
    """It was still at work, and not in a circle, when its turns were over."""
    ENVIRONMENT_FAULT = "environment fault"
    """What the policy acts in or speaks through broke: nothing to learn from."""
    VERIFIER_FAULT = "verifier fault"
    """It was played and could not be judged: the grade is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    failure_class: FailureClass
    turn: int
    """From 1; 0 is before the first."""
    excerpt: str
    """What was said there, shortened."""
