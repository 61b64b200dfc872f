"""Random policy: calls tools at random with arguments that their schemas allow, then stops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, floor
from random import Random
from typing import Any

from skyfleet.chat.message import Message, ToolCall, ToolSpec
from skyfleet.engines.sampling import SamplingParams
from skyfleet.envs.env import DONE, Opening
from skyfleet.rollouts.conversation import MessageConversation, Policy
from skyfleet.tasks.task import Task

RANDOM_CALLS = 8
"""An episode; then it says that it is done."""

_SYLLABLES = ("zor", "qua", "bex", "tiv", "lum", "gry", "pax", "neb")
_DEEPEST = 4
"""Schemas may name themselves; below this, whatever may be left out is."""


def random_policy(*, seed: int) -> Policy:
    """The same seed makes the same calls in the same session; attempts at a task differ."""

    def start(task: Task, opening: Opening, session: str) -> MessageConversation:
        model = RandomModel(Random(f"random caller/{seed}/{session}"))
        return MessageConversation(opening, model=model, sampling=SamplingParams())

    return start


class RandomModel:
    def __init__(self, rng: Random) -> None:
        self._rng, self._left = rng, RANDOM_CALLS

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], sampling: SamplingParams
    ) -> Message:
        self._left -= 1
        if self._left < 0 or not tools:
            return Message(role="assistant", content=DONE)
        tool = self._rng.choice(tools)
        arguments = random_object(tool.parameters, self._rng)
        call = ToolCall(id=f"call_{self._left}", name=tool.name, arguments=arguments)
        return Message(role="assistant", tool_calls=(call,))


def random_object(schema: Mapping[str, Any], rng: Random) -> dict[str, Any]:
    """Every required property, and each other one half of the time."""
    return _object(schema, rng, schema, 0)


def _object(
    schema: Mapping[str, Any], rng: Random, root: Mapping[str, Any], depth: int
) -> dict[str, Any]:
    required = schema.get("required", ())
    chance = 0.5 if depth < _DEEPEST else 0.0
    return {
        name: _value(described, rng, root, depth + 1)
        for name, described in schema.get("properties", {}).items()
        if name in required or rng.random() < chance
    }


def _value(schema: Mapping[str, Any], rng: Random, root: Mapping[str, Any], depth: int) -> Any:
    if "$ref" in schema:
        return _value(_referred(root, schema["$ref"]), rng, root, depth)
    if "const" in schema:
        return schema["const"]
    if choices := schema.get("enum"):
        return rng.choice(choices)
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return _value(rng.choice(options), rng, root, depth)
    kind = schema.get("type", "string")
    if isinstance(kind, list):
        kind = rng.choice(kind)
    match kind:
        case "array":
            least = schema.get("minItems", 1 if depth < _DEEPEST else 0)
            return [_value(schema.get("items", {}), rng, root, depth + 1) for _ in range(least)]
        case "object":
            return _object(schema, rng, root, depth)
        case "integer":
            low, high = _bounds(schema)
            return rng.randint(min(ceil(low), floor(high)), floor(high))
        case "number":
            return rng.uniform(*_bounds(schema))
        case "boolean":
            return rng.random() < 0.5
        case "null":
            return None
    return _text(schema, rng)


def _bounds(schema: Mapping[str, Any]) -> tuple[float, float]:
    """From 1 up, a hundred wide, where the schema does not say."""
    low = schema.get("minimum", schema.get("exclusiveMinimum", 0) + 1)
    high = schema.get("maximum", schema.get("exclusiveMaximum", low + 100) - 1)
    return min(low, high), high


def _text(schema: Mapping[str, Any], rng: Random) -> str:
    if schema.get("format") == "date":
        return f"{rng.randint(2024, 2026)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
    words = "".join(rng.choices(_SYLLABLES, k=max(2, -(-schema.get("minLength", 0) // 3))))
    return words[: schema.get("maxLength")]


def _referred(root: Mapping[str, Any], address: str) -> Mapping[str, Any]:
    """`#/$defs/Person` within the tool's own schema."""
    found: Any = root
    for name in address.removeprefix("#/").split("/"):
        found = found[name]
    described: Mapping[str, Any] = found
    return described
