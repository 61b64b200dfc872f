"""Given: what an env of anybody's gives back, looked at before anyone counts on it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import isfinite
from numbers import Real

from skyfleet.chat.message import Message
from skyfleet.envs.env import Observation, Step
from skyfleet.envs.verifiers.running import SUCCESS_REWARD
from skyfleet.errors import EnvError, VerifierError
from skyfleet.tasks.task import Grade


def validate_observation(opening: object) -> Observation:
    return _checked(opening, "reset()")


def validate_step(step: object) -> Step:
    if not isinstance(step, Step):
        raise EnvError(f"step() gave {step!r:.100}, no Step")
    _check_messages(step.messages, "step()")
    if step.opening is not None:
        _checked(step.opening, "step()")
    if not is_finite(step.reward):
        raise EnvError(f"step() gave the reward {step.reward!r:.100}; give a finite number")
    return step if isinstance(step.reward, float) else replace(step, reward=float(step.reward))


def validate_grade(grade: object) -> Grade | None:
    if grade is None:
        return None
    if not isinstance(grade, Grade):
        raise VerifierError(f"grade() gave {grade!r:.100}; give a Grade, or None for unknown")
    if not is_finite(grade.reward):
        raise VerifierError(
            f"grade() gave the reward {grade.reward!r:.100}; give a finite number, or None for "
            "a grade that is unknown"
        )
    return grade if isinstance(grade.reward, float) else replace(grade, reward=float(grade.reward))


def _checked(opening: object, by: str) -> Observation:
    if not isinstance(opening, Observation):
        raise EnvError(f"{by} gave {opening!r:.100}, no Opening")
    if not opening.messages:
        raise EnvError(f"{by} gave an Opening without a message; give the agent one")
    _check_messages(opening.messages, by)
    return opening


def _check_messages(messages: Iterable[object], by: str) -> None:
    for message in messages:
        if not isinstance(message, Message):
            raise EnvError(f"{by} gave {message!r:.100} among its messages, no Message")


def is_finite(number: object) -> bool:
    """Numbers of numpy are numbers too."""
    try:
        return isinstance(number, Real) and isfinite(number)
    except OverflowError:  # an integer larger than any float
        return False


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
