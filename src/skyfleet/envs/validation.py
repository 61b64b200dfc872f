"""Validate what an environment returns, once, and convert it to plain Python values.

Anything of a wrong type is an error of that episode which names the method and the field.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import islice
from math import isfinite
from typing import Any

from skyfleet.envs.env import Observation, Step
from skyfleet.envs.message_validation import (
    MAX_MESSAGES,
    MAX_NAME_CHARACTERS,
    convert_messages,
    convert_tools,
    is_plain_text,
)
from skyfleet.envs.values import (
    convert_bool,
    convert_count,
    convert_text,
    format_value,
    is_finite,
    unwrap,
)
from skyfleet.envs.verifiers.run_verifier import SUCCESS_REWARD
from skyfleet.errors import EnvError, EpisodeError, VerifierError
from skyfleet.redaction import redact_known
from skyfleet.tasks.task import Grade

MAX_NUMBERS = 1_000
"""Entries of `Step.info` and of `Grade.parts`."""
MAX_EXPLANATION_CHARACTERS = 100_000

logger = logging.getLogger(__name__)
_warned_names: set[str] = set()
"""Of values in `Step.info` that are no numbers."""

Reward = float | Grade | None
"""None: the episode could not be judged."""


def validate_observation(observation: object, method: str = "reset()") -> Observation:
    if not isinstance(observation, Observation):
        raise EnvError(f"{method} returned {format_value(observation)}, not an Observation")
    messages = convert_messages(observation.messages, method)
    if not messages:
        raise EnvError(f"{method} returned an Observation without messages; add at least one")
    tools = convert_tools(observation.tools, method)
    native = observation.use_native_tool_calling
    if native is not None and type(native) is not bool:
        native = convert_bool(native, f"{method}: use_native_tool_calling", EnvError)
    is_plain = messages is observation.messages and tools is observation.tools
    if (
        type(observation) is Observation
        and is_plain
        and native is observation.use_native_tool_calling
    ):
        return observation
    return Observation(messages=messages, tools=tools, use_native_tool_calling=native)


def validate_step(step: object) -> Step:
    if not isinstance(step, Step):
        raise EnvError(f"step() returned {format_value(step)}, not a Step")
    if _is_plain_step(step):
        return step
    opening = step.opening
    values: dict[str, Any] = {
        "messages": convert_messages(step.messages, "step()"),
        "done": convert_bool(step.done, "step(): done", EnvError),
        "reward": _convert_reward(step.reward, "step()", EnvError),
        "info": validate_info(step.info) if step.info or type(step.info) is not dict else step.info,
        "keep_recent_turns": convert_count(step.keep_recent_turns, "step(): keep_recent_turns"),
        "opening": None if opening is None else validate_observation(opening, "step()"),
        "success": None
        if step.success is None
        else convert_bool(step.success, "step(): success", EnvError),
    }
    if type(step) is Step and all(values[name] is getattr(step, name) for name in values):
        return step
    return Step(**values)


def _is_plain_step(step: Step) -> bool:
    """Whether it needs no conversion, as nearly all do not."""
    return (
        type(step) is Step
        and type(step.messages) is tuple
        and len(step.messages) <= MAX_MESSAGES
        and all(map(is_plain_text, step.messages))
        and type(step.done) is bool
        and type(step.reward) is float
        and isfinite(step.reward)
        and type(step.info) is dict
        and not step.info
        and step.keep_recent_turns is None
        and step.opening is None
        and (step.success is None or type(step.success) is bool)
    )


def validate_grade(grade: object) -> Grade | None:
    if grade is None:
        return None
    if not isinstance(grade, Grade):
        raise VerifierError(
            f"grade() returned {format_value(grade)}; return a Grade, or None if it is unknown"
        )
    explanation = grade.explanation
    if type(explanation) is not str or len(explanation) > MAX_EXPLANATION_CHARACTERS:
        explanation = convert_text(explanation, "grade(): explanation", VerifierError)
        if len(explanation) > MAX_EXPLANATION_CHARACTERS:
            explanation = f"{explanation[:MAX_EXPLANATION_CHARACTERS]}\n(cut)"
    values: dict[str, Any] = {
        "reward": _convert_reward(grade.reward, "grade()", VerifierError),
        "success": convert_bool(grade.success, "grade(): success", VerifierError),
        "parts": _convert_parts(grade.parts),
        "explanation": explanation,
    }
    if type(grade) is Grade and all(values[name] is getattr(grade, name) for name in values):
        return grade
    return Grade(**values)


def parse_grade(result: Reward, *, by: str) -> Grade | None:
    """Turn what a reward function returned into a Grade; errors name who returned it (`by`)."""
    if result is None:
        return None
    reward = unwrap(result.reward if isinstance(result, Grade) else result)
    if not is_finite(reward):
        raise VerifierError(
            f"{by} returned {format_value(result)}; return a finite number, a Grade with one, or None"
        )
    if isinstance(result, Grade):
        return result
    return Grade(reward=float(reward), success=bool(reward >= SUCCESS_REWARD))


def _convert_reward(reward: object, method: str, kind: type[EpisodeError]) -> float:
    if type(reward) is not float:
        reward = unwrap(reward)
    if not is_finite(reward):
        unknown = ", or None if the grade is unknown" if kind is VerifierError else ""
        raise kind(
            f"{method} returned the reward {format_value(reward)}; return a finite number{unknown}"
        )
    return reward if type(reward) is float else float(reward)  # type: ignore[arg-type]


def validate_info(info: object) -> dict[str, float]:
    """Keep the numbers. A metric must not fail an episode: any other value is named once."""
    if not isinstance(info, Mapping):
        raise EnvError(
            f"step() returned info={format_value(info)}; return a mapping of names to numbers"
        )
    numbers: dict[str, float] = {}
    for key, given in islice(info.items(), MAX_NUMBERS + 1):
        name = redact_known(key) if type(key) is str else _name_number(key)
        value = unwrap(given)
        if is_finite(value):
            numbers[name] = float(value)
        else:
            _warn_of_value(name, value)
    if len(numbers) > MAX_NUMBERS:
        raise EnvError(f"step() returned more than {MAX_NUMBERS:,} numbers in info; return fewer")
    return numbers


def _warn_of_value(name: str, value: object) -> None:
    if name in _warned_names or len(_warned_names) >= MAX_NUMBERS:
        return
    _warned_names.add(name)
    logger.warning(
        "step() returned info[%r]=%s, which is not a finite number and becomes no metric; return a "
        "number or leave it out. This is logged once",
        name[:MAX_NAME_CHARACTERS],
        format_value(value),
    )


def _name_number(key: object) -> str:
    """The name of a metric or a part, which files and trackers show: without known secrets."""
    key = unwrap(key)
    return redact_known(convert_text(key, "") if isinstance(key, str) else format_value(key))


def _convert_parts(parts: object) -> Mapping[str, float]:
    if type(parts) is dict and not parts:
        return parts
    if not isinstance(parts, Mapping):
        raise VerifierError(f"grade(): parts is {format_value(parts)}; return a mapping")
    converted: dict[str, float] = {}
    for key, given in islice(parts.items(), MAX_NUMBERS + 1):
        name, value = _name_number(key), unwrap(given)
        if not is_finite(value):
            raise VerifierError(
                f"grade(): parts[{name!r:.60}] is {format_value(value)}; return a finite number"
            )
        converted[name] = value if type(value) is float else float(value)
    if len(converted) > MAX_NUMBERS:
        raise VerifierError(f"grade(): more than {MAX_NUMBERS:,} parts; return fewer")
    return converted
