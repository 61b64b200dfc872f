"""Validate what an environment returns, once, and convert it to plain Python values.

Numbers of numpy and torch become Python's, lists become tuples, subclasses become their base class.
Anything else of a wrong type is an error of that episode which names the method and the field.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import islice
from math import isfinite
from numbers import Real
from typing import Any, TypeVar, get_args

from skyfleet.chat.message import Image, Message, Part, Role, Text, ToolCall, ToolSpec
from skyfleet.envs.env import Observation, Step
from skyfleet.envs.values import format_value
from skyfleet.envs.verifiers.run_verifier import SUCCESS_REWARD
from skyfleet.errors import EnvError, EpisodeError, VerifierError
from skyfleet.tasks.task import Grade

MAX_MESSAGES = 10_000
"""In one observation or step."""
MAX_TOOLS = 2_000
MAX_NUMBERS = 1_000
"""Entries of `Step.info` and of `Grade.parts`."""
MAX_JSON_CHARACTERS = 1_000_000
"""Of one tool's schema or one call's arguments."""
MAX_JSON_DEPTH = 100
MAX_EXPLANATION_CHARACTERS = 100_000
_MAX_NAME_CHARACTERS = 200

_ROLES = frozenset(get_args(Role))
T = TypeVar("T")

logger = logging.getLogger(__name__)
_warned_names: set[str] = set()
"""Of values in `Step.info` that are no numbers."""

_checked_tools: dict[int, tuple[object, ToolSpec]] = {}
"""By id: a tool that an environment returned and what it was converted to. Environments return the
same tools in every episode, and checking their schemas would be a tenth of a short one."""
_MAX_CHECKED_TOOLS = 4_096
_checked_tuples: dict[int, tuple[object, tuple[ToolSpec, ...]]] = {}
_MAX_CHECKED_TUPLES = 64


def validate_observation(observation: object, method: str = "reset()") -> Observation:
    if not isinstance(observation, Observation):
        raise EnvError(f"{method} returned {format_value(observation)}, not an Observation")
    messages = _convert_messages(observation.messages, method)
    if not messages:
        raise EnvError(f"{method} returned an Observation without messages; add at least one")
    tools = _convert_tools(observation.tools, method)
    native = observation.use_native_tool_calling
    if native is not None and type(native) is not bool:
        native = _convert_bool(native, f"{method}: use_native_tool_calling", EnvError)
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
        "messages": _convert_messages(step.messages, "step()"),
        "done": _convert_bool(step.done, "step(): done", EnvError),
        "reward": _convert_reward(step.reward, "step()", EnvError),
        "info": validate_info(step.info) if step.info or type(step.info) is not dict else step.info,
        "keep_recent_turns": _convert_count(step.keep_recent_turns, "step(): keep_recent_turns"),
        "opening": None if opening is None else validate_observation(opening, "step()"),
        "success": None
        if step.success is None
        else _convert_bool(step.success, "step(): success", EnvError),
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
        and all(map(_is_plain_text, step.messages))
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
        explanation = _convert_text(explanation, "grade(): explanation", VerifierError)
        if len(explanation) > MAX_EXPLANATION_CHARACTERS:
            explanation = f"{explanation[:MAX_EXPLANATION_CHARACTERS]}\n(cut)"
    values: dict[str, Any] = {
        "reward": _convert_reward(grade.reward, "grade()", VerifierError),
        "success": _convert_bool(grade.success, "grade(): success", VerifierError),
        "parts": _convert_parts(grade.parts),
        "explanation": explanation,
    }
    if type(grade) is Grade and all(values[name] is getattr(grade, name) for name in values):
        return grade
    return Grade(**values)


def count_characters(messages: Iterable[Message]) -> int:
    """The characters of all messages; an image counts a sixteenth of its bytes."""
    total = 0
    for message in messages:
        content = message.content
        if isinstance(content, str):
            total += len(content)
        else:
            total += sum(
                len(part.text) if isinstance(part, Text) else len(part.data) // 16
                for part in content
            )
        total += len(message.reasoning or "")
    return total


def cut_messages(messages: Iterable[Message], max_characters: int) -> tuple[Message, ...]:
    """What is recorded of messages that are too long for any agent: their beginning."""
    kept: list[Message] = []
    left = max_characters
    for message in messages:
        if left <= 0:
            break
        text = message.text
        note = f"\n(cut: the first {left:,} of {len(text):,} characters)"
        cut = text[:left] + (note if len(text) > left else "")
        reasoning = message.reasoning and message.reasoning[:left]
        kept.append(replace(message, content=cut, reasoning=reasoning))
        left -= len(text)
    return tuple(kept)


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
    reward = _unwrap(result.reward if isinstance(result, Grade) else result)
    if not is_finite(reward):
        raise VerifierError(
            f"{by} returned {format_value(result)}; return a finite number, a Grade with one, or None"
        )
    if isinstance(result, Grade):
        return result
    return Grade(reward=float(reward), success=bool(reward >= SUCCESS_REWARD))


def _unwrap(value: Any) -> Any:
    """The Python value of a scalar of numpy or torch, without importing either."""
    if type(value) in (float, int, bool, str) or value is None:
        return value
    shape = getattr(value, "shape", None)
    item = getattr(value, "item", None)
    if shape is not None and callable(item) and all(length == 1 for length in shape):
        return item()
    return value


def _convert_reward(reward: object, method: str, kind: type[EpisodeError]) -> float:
    if type(reward) is not float:
        reward = _unwrap(reward)
    if not is_finite(reward):
        unknown = ", or None if the grade is unknown" if kind is VerifierError else ""
        raise kind(
            f"{method} returned the reward {format_value(reward)}; return a finite number{unknown}"
        )
    return reward if type(reward) is float else float(reward)  # type: ignore[arg-type]


def _convert_bool(value: object, where: str, kind: type[EpisodeError]) -> bool:
    if type(value) is bool:
        return value
    value = _unwrap(value)
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    raise kind(f"{where} is {format_value(value)}; return True or False")


def _convert_count(value: object, where: str) -> int | None:
    value = _unwrap(value)
    if value is None or (type(value) is int and value >= 0):
        return value
    raise EnvError(f"{where} is {format_value(value)}; return None or a number of turns")


def _convert_text(value: object, where: str, kind: type[EpisodeError] = EnvError) -> str:
    if type(value) is str:
        return value
    if isinstance(value, str):
        # Not str(value): a subclass may override __str__.
        return str.__str__(value)
    raise kind(f"{where} is {format_value(value)}, not a text; convert it with str(...)")


def _convert_items(
    given: object, where: str, limit: int, convert: Callable[[Any], T]
) -> tuple[T, ...]:
    """A tuple of converted items: the same tuple if nothing changed."""
    if not isinstance(given, tuple | list):
        raise EnvError(f"{where} is {format_value(given)}; return a tuple")
    items = given if type(given) is tuple else tuple(islice(given, limit + 1))
    if len(items) > limit:
        raise EnvError(f"{where} has {len(items):,} entries, more than {limit:,}; return fewer")
    converted = tuple([convert(item) for item in items])
    is_same = all(new is old for new, old in zip(converted, items, strict=True))
    return items if is_same else converted


def _convert_messages(messages: object, method: str) -> tuple[Message, ...]:
    if type(messages) is tuple and len(messages) == 1 and _is_plain_text(messages[0]):
        return messages
    return _convert_items(
        messages,
        f"{method}: messages",
        MAX_MESSAGES,
        lambda message: _convert_message(message, method),
    )


def _is_plain_text(message: object) -> bool:
    """Whether it is a message that needs no conversion, as nearly all are."""
    return (
        type(message) is Message
        and type(message.content) is str
        and type(message.role) is str
        and message.role in _ROLES
        and (message.tool_call_id is None or type(message.tool_call_id) is str)
        and message.reasoning is None
        and type(message.tool_calls) is tuple
        and not message.tool_calls
        and type(message.malformed_calls) is tuple
        and not message.malformed_calls
        and type(message.repaired_calls) is int
        and message.repaired_calls >= 0
        and type(message.is_error) is bool
    )


def _convert_message(message: object, method: str) -> Message:
    if _is_plain_text(message):
        assert isinstance(message, Message)
        return message
    if not isinstance(message, Message):
        raise EnvError(
            f"{method} returned {format_value(message)} among its messages, not a Message"
        )
    where = f"{method}: a message's"
    role = _convert_text(message.role, f"{where} role")
    if role not in _ROLES:
        raise EnvError(f"{where} role is {role!r:.60}; use one of {', '.join(sorted(_ROLES))}")
    content: str | tuple[Part, ...]
    if isinstance(message.content, str):
        content = _convert_text(message.content, f"{where} content")
    elif isinstance(message.content, tuple | list):
        content = _convert_items(
            message.content,
            f"{where} content",
            MAX_MESSAGES,
            lambda part: _convert_part(part, where),
        )
    else:
        raise EnvError(
            f"{where} content is {format_value(message.content)}; return a text, or Text and Image parts"
        )
    return Message(
        role=role,  # type: ignore[arg-type]
        content=content,
        reasoning=None
        if message.reasoning is None
        else _convert_text(message.reasoning, f"{where} reasoning"),
        tool_calls=_convert_items(
            message.tool_calls,
            f"{where} tool_calls",
            MAX_TOOLS,
            lambda call: _convert_call(call, where),
        ),
        malformed_calls=_convert_items(
            message.malformed_calls,
            f"{where} malformed_calls",
            MAX_TOOLS,
            lambda text: _convert_text(text, f"{where} malformed_calls"),
        ),
        repaired_calls=_convert_count(message.repaired_calls, f"{where} repaired_calls") or 0,
        tool_call_id=None
        if message.tool_call_id is None
        else _convert_text(message.tool_call_id, f"{where} tool_call_id"),
        is_error=_convert_bool(message.is_error, f"{where} is_error", EnvError),
    )


def _convert_part(part: object, where: str) -> Part:
    if isinstance(part, Text):
        return part if type(part.text) is str else Text(_convert_text(part.text, f"{where} text"))
    if isinstance(part, Image) and isinstance(part.data, bytes | bytearray):
        return Image(bytes(part.data), _convert_text(part.media_type, f"{where} media_type"))
    raise EnvError(f"{where} content has {format_value(part)}; use Text(...) or Image(bytes)")


def _convert_call(call: object, where: str) -> ToolCall:
    if not isinstance(call, ToolCall):
        raise EnvError(f"{where} tool_calls have {format_value(call)}, not a ToolCall")
    return ToolCall(
        id=_convert_text(call.id, f"{where} tool call id"),
        name=_convert_text(call.name, f"{where} tool call name"),
        arguments=_convert_json(call.arguments, f"{where} tool call arguments"),
    )


def _convert_tools(tools: object, method: str) -> tuple[ToolSpec, ...]:
    if type(tools) is tuple and not tools:
        return tools
    known = _checked_tuples.get(id(tools))
    if known is not None and known[0] is tools:
        return known[1]
    converted = _convert_items(
        tools, f"{method}: tools", MAX_TOOLS, lambda tool: _convert_tool(tool, method)
    )
    names = [tool.name for tool in converted]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise EnvError(f"{method} returned two tools named {twice!r:.60}; rename one")
    if type(tools) is tuple:
        if len(_checked_tuples) >= _MAX_CHECKED_TUPLES:
            del _checked_tuples[next(iter(_checked_tuples))]
        _checked_tuples[id(tools)] = (tools, converted)
    return converted


def _convert_tool(tool: object, method: str) -> ToolSpec:
    known = _checked_tools.get(id(tool))
    if known is not None and known[0] is tool:
        return known[1]
    if not isinstance(tool, ToolSpec):
        raise EnvError(f"{method} returned {format_value(tool)} among its tools, not a ToolSpec")
    name = _convert_text(tool.name, f"{method}: a tool's name")
    if not name or len(name) > _MAX_NAME_CHARACTERS:
        raise EnvError(f"{method}: a tool's name is {format_value(name)}; give it a short one")
    where = f"{method}: tool {name}"
    description = _convert_text(tool.description, f"{where}: description")
    if len(description) > MAX_JSON_CHARACTERS:
        raise EnvError(f"{where}: description has {len(description):,} characters; shorten it")
    parameters = _convert_json(tool.parameters, f"{where}: parameters")
    converted = ToolSpec(name=name, description=description, parameters=parameters)
    if len(_checked_tools) >= _MAX_CHECKED_TOOLS:
        del _checked_tools[next(iter(_checked_tools))]
    _checked_tools[id(tool)] = (tool, converted)
    return converted


def _convert_json(value: object, where: str) -> dict[str, Any]:
    """A JSON object with plain values; numpy's scalars and tuples become JSON's."""
    if not isinstance(value, Mapping):
        raise EnvError(f"{where} is {format_value(value)}; return a mapping")
    budget = [MAX_JSON_CHARACTERS]
    plain = _to_plain(value, where, 0, budget)
    try:
        json.dumps(plain, allow_nan=False)
    except ValueError as error:
        raise EnvError(f"{where} is not JSON: {error}") from None
    assert isinstance(plain, dict)
    return plain


def _to_plain(value: Any, where: str, depth: int, budget: list[int]) -> Any:
    budget[0] -= len(value) if isinstance(value, str) else 1
    if budget[0] < 0 or depth > MAX_JSON_DEPTH:
        raise EnvError(
            f"{where} is larger than {MAX_JSON_CHARACTERS:,} characters or deeper than "
            f"{MAX_JSON_DEPTH} levels; shorten it"
        )
    value = _unwrap(value)
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, str):
        return _convert_text(value, where)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Mapping):
        return {
            _to_key(key, where): _to_plain(item, where, depth + 1, budget)
            for key, item in islice(value.items(), MAX_JSON_CHARACTERS)
        }
    if isinstance(value, tuple | list):
        return [_to_plain(item, where, depth + 1, budget) for item in value]
    raise EnvError(f"{where} has {format_value(value)}, which is not JSON; convert it")


def _to_key(key: object, where: str) -> str:
    key = _unwrap(key)
    if isinstance(key, str):
        return _convert_text(key, where)
    if isinstance(key, bool | int | float) or key is None:
        return json.dumps(key)  # as JSON itself writes such a key
    raise EnvError(f"{where} has the key {format_value(key)}; use texts as keys")


def validate_info(info: object) -> dict[str, float]:
    """Keep the numbers. A metric must not fail an episode: any other value is named once."""
    if not isinstance(info, Mapping):
        raise EnvError(
            f"step() returned info={format_value(info)}; return a mapping of names to numbers"
        )
    numbers: dict[str, float] = {}
    for key, given in islice(info.items(), MAX_NUMBERS + 1):
        name, value = key if type(key) is str else _name_number(key), _unwrap(given)
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
        name[:_MAX_NAME_CHARACTERS],
        format_value(value),
    )


def _name_number(key: object) -> str:
    key = _unwrap(key)
    return _convert_text(key, "") if isinstance(key, str) else format_value(key)


def _convert_parts(parts: object) -> Mapping[str, float]:
    if type(parts) is dict and not parts:
        return parts
    if not isinstance(parts, Mapping):
        raise VerifierError(f"grade(): parts is {format_value(parts)}; return a mapping")
    converted: dict[str, float] = {}
    for key, given in islice(parts.items(), MAX_NUMBERS + 1):
        name, value = _name_number(key), _unwrap(given)
        if not is_finite(value):
            raise VerifierError(
                f"grade(): parts[{name!r:.60}] is {format_value(value)}; return a finite number"
            )
        converted[name] = value if type(value) is float else float(value)
    if len(converted) > MAX_NUMBERS:
        raise VerifierError(f"grade(): more than {MAX_NUMBERS:,} parts; return fewer")
    return converted
