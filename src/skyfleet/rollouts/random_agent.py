"""A baseline agent that calls random tools with random valid arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, floor
from random import Random
from typing import Any
from urllib.parse import unquote

from skyfleet.chat.message import Message, ToolCall, ToolSpec
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.env import DONE, Observation
from skyfleet.rollouts.conversation import AgentFactory, MessageConversation
from skyfleet.tasks.task import Task

RANDOM_CALLS = 8
"""An episode; then it says that it is done."""

_SYLLABLES = ("zor", "qua", "bex", "tiv", "lum", "gry", "pax", "neb")
_DEEPEST = 4
"""Schemas may name themselves; below this, whatever may be left out is."""


def random_policy(*, seed: int) -> AgentFactory:
    """The same seed makes the same calls in the same session; attempts at a task differ."""

    def start(task: Task, opening: Observation, session: str) -> MessageConversation:
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
    """Every required property, and each other one half of the time.

    Looked at are type, properties, required, items, minItems, maxItems, enum, const, anyOf, oneOf,
    allOf, references within the schema, numeric bounds, multipleOf, minLength, maxLength and
    dates. What else a schema demands, such as a pattern, is not; a schema that is no object
    (`true`) allows anything, and gets a word.
    """
    return _object(_plain(schema, schema), rng, schema, 0)


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


def _value(described: Any, rng: Random, root: Mapping[str, Any], depth: int) -> Any:
    schema = _plain(described, root)
    if "const" in schema:
        return schema["const"]
    if choices := schema.get("enum"):
        return rng.choice(choices)
    if options := schema.get("anyOf") or schema.get("oneOf"):
        others = {key: value for key, value in schema.items() if key not in ("anyOf", "oneOf")}
        return _value({**others, "allOf": [rng.choice(options)]}, rng, root, depth)
    kind = schema.get("type") or ("object" if schema.get("properties") else "string")
    if isinstance(kind, list):
        kind = rng.choice(kind)
    match kind:
        case "array":
            least = schema.get("minItems", 1 if depth < _DEEPEST else 0)
            count = min(least, schema.get("maxItems", least))
            return [_value(schema.get("items"), rng, root, depth + 1) for _ in range(count)]
        case "object":
            return _object(schema, rng, root, depth)
        case "integer" | "number":
            return _number(schema, rng, whole=kind == "integer")
        case "boolean":
            return rng.random() < 0.5
        case "null":
            return None
    return _text(schema, rng)


def _number(schema: Mapping[str, Any], rng: Random, *, whole: bool) -> float:
    """From 1 up, a hundred wide, where the schema does not say."""
    low, above = _bound(schema, "minimum", "exclusiveMinimum")
    high, below = _bound(schema, "maximum", "exclusiveMaximum")
    if low is None:
        low = 1 if high is None or high >= 1 else high - 100
    if high is None:
        high = low + 100
    step = schema.get("multipleOf", 1 if whole else None)
    if step is None:
        edge = (high - low) / 1000
        return rng.uniform(low + edge * above, high - edge * below)
    first = floor(low / step) + 1 if above else ceil(low / step)
    last = ceil(high / step) - 1 if below else floor(high / step)
    value = round(step * rng.randint(min(first, last), last), 9)
    return int(value) if whole else value


def _bound(schema: Mapping[str, Any], closed: str, opened: str) -> tuple[float | None, bool]:
    """And whether it is excluded itself; in older schemas `exclusiveMinimum` only says that."""
    if isinstance(at := schema.get(opened), bool) or at is None:
        return schema.get(closed), bool(at)
    return at, True


def _text(schema: Mapping[str, Any], rng: Random) -> str:
    if schema.get("format") == "date":
        return f"{rng.randint(2024, 2026)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
    words = "".join(rng.choices(_SYLLABLES, k=max(2, -(-schema.get("minLength", 0) // 3))))
    return words[: schema.get("maxLength")]


def _plain(described: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with what it refers to and all of its `allOf` in its place."""
    if not isinstance(described, Mapping):
        return {}
    plain = {key: value for key, value in described.items() if key not in ("$ref", "allOf")}
    parts = [_referred(root, described["$ref"])] if "$ref" in described else []
    for part in (_plain(one, root) for one in (*parts, *described.get("allOf", ()))):
        properties = {**plain.get("properties", {}), **part.get("properties", {})}
        required = [*plain.get("required", ()), *part.get("required", ())]
        plain |= {**part, "properties": properties, "required": required}
    return plain


def _referred(root: Mapping[str, Any], address: str) -> Any:
    """`#/$defs/Person` within the tool's own schema; what is not there allows anything."""
    found: Any = root
    for name in address.split("/")[1:]:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
