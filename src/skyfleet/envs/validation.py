"""Validate what an environment returns before anything relies on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import isfinite
from numbers import Real

from skyfleet.chat.message import Message
from skyfleet.envs.env import Observation, Step
from skyfleet.envs.verifiers.running import SUCCESS_REWARD
from skyfleet.errors import EnvError, VerifierError
from skyfleet.tasks.task import Grade


def validate_observation(observation: object) -> Observation:
    return _validate_observation(observation, "reset()")


def validate_step(step: object) -> Step:
    """Check the step; its reward and the numbers of its info become floats."""
    if not isinstance(step, Step):
        raise EnvError(f"step() returned {step!r:.100}, not a Step")
    _validate_messages(step.messages, "step()")
    if step.opening is not None:
        _validate_observation(step.opening, "step()")
    if not is_finite(step.reward):
        raise EnvError(f"step() returned the reward {step.reward!r:.100}; return a finite number")
    if step.info or not isinstance(step.info, Mapping):
        step = replace(step, info=_validate_info(step.info))
    return step if isinstance(step.reward, float) else replace(step, reward=float(step.reward))


def validate_grade(grade: object) -> Grade | None:
    if grade is None:
        return None
    if not isinstance(grade, Grade):
        raise VerifierError(
            f"grade() returned {grade!r:.100}; return a Grade, or None if it is unknown"
        )
    if not is_finite(grade.reward):
        raise VerifierError(
            f"grade() returned the reward {grade.reward!r:.100}; return a finite number, or None "
            "if the grade is unknown"
        )
    return grade if isinstance(grade.reward, float) else replace(grade, reward=float(grade.reward))


def _validate_observation(observation: object, method: str) -> Observation:
    if not isinstance(observation, Observation):
        raise EnvError(f"{method} returned {observation!r:.100}, not an Observation")
    if not observation.messages:
        raise EnvError(f"{method} returned an Observation without messages; add at least one")
    _validate_messages(observation.messages, method)
    return observation


def _validate_messages(messages: Iterable[object], method: str) -> None:
    for message in messages:
        if not isinstance(message, Message):
            raise EnvError(f"{method} returned {message!r:.100} among its messages, not a Message")


def _validate_info(info: object) -> dict[str, float]:
    """Keep the numbers; everything else an environment puts into `info` is its own business."""
    if not isinstance(info, Mapping):
        raise EnvError(f"step() returned info={info!r:.100}; return a mapping of names to numbers")
    numbers = {str(name): value for name, value in info.items() if isinstance(value, Real)}
    for name, value in numbers.items():
        if not is_finite(value):
            raise EnvError(f"step() returned info[{name!r}]={value!r}; return a finite number")
    return {name: float(value) for name, value in numbers.items()}


def is_finite(number: object) -> bool:
    """Whether it is a finite real number; numpy's scalars count as numbers."""
    try:
        return isinstance(number, Real) and isfinite(number)
    except OverflowError:  # an integer larger than any float
        return False


Reward = float | Grade | None
"""None: the episode could not be judged."""


def parse_grade(result: Reward, *, by: str) -> Grade | None:
    """Turn what a reward function returned into a Grade; errors name who returned it (`by`)."""
    if result is None:
        return None
    reward = result.reward if isinstance(result, Grade) else result
    if not is_finite(reward):
        raise VerifierError(
            f"{by} returned {result!r:.200}; return a finite number, a Grade with one, or None"
        )
    if isinstance(result, Grade):
        return result
    return Grade(reward=float(reward), success=bool(reward >= SUCCESS_REWARD))
