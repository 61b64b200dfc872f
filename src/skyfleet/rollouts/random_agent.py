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
"""Per episode; then it declares that it is done."""

_SYLLABLES = ("zor", "qua", "bex", "tiv", "lum", "gry", "pax", "neb")
_MAX_DEPTH = 4
"""Schemas may refer to themselves; below this depth optional properties are omitted."""


def random_policy(*, seed: int) -> AgentFactory:
    """Make the same calls for the same seed and session; attempts at a task differ."""

    def start(task: Task, observation: Observation, session: str) -> MessageConversation:
        model = RandomModel(Random(f"random caller/{seed}/{session}"))
        return MessageConversation(observation, model=model, sampling=SamplingParams())

    return start


class RandomModel:
    def __init__(self, rng: Random) -> None:
        self._rng, self._remaining = rng, RANDOM_CALLS

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], sampling: SamplingParams
    ) -> Message:
        self._remaining -= 1
        if self._remaining < 0 or not tools:
            return Message(role="assistant", content=DONE)
        tool = self._rng.choice(tools)
        arguments = random_object(tool.parameters, self._rng)
        call = ToolCall(id=f"call_{self._remaining}", name=tool.name, arguments=arguments)
        return Message(role="assistant", tool_calls=(call,))


def random_object(schema: Mapping[str, Any], rng: Random) -> dict[str, Any]:
    """Generate every required property, and each optional one half of the time.

    Supported are type, properties, required, items, minItems, maxItems, enum, const, anyOf, oneOf,
    allOf, references within the schema, numeric bounds, multipleOf, minLength, maxLength and
    dates. Other constraints, such as a pattern, are ignored; a schema that is not an object
    (`true`) allows anything and gets a word.
    """
    return _generate_object(_inline(schema, schema), rng, schema, 0)


def _generate_object(
    schema: Mapping[str, Any], rng: Random, root: Mapping[str, Any], depth: int
) -> dict[str, Any]:
    required = schema.get("required", ())
    chance = 0.5 if depth < _MAX_DEPTH else 0.0
    return {
        name: _generate_value(subschema, rng, root, depth + 1)
        for name, subschema in schema.get("properties", {}).items()
        if name in required or rng.random() < chance
    }


def _generate_value(subschema: Any, rng: Random, root: Mapping[str, Any], depth: int) -> Any:
    schema = _inline(subschema, root)
    if "const" in schema:
        return schema["const"]
    if choices := schema.get("enum"):
        return rng.choice(choices)
    if options := schema.get("anyOf") or schema.get("oneOf"):
        others = {key: value for key, value in schema.items() if key not in ("anyOf", "oneOf")}
        return _generate_value({**others, "allOf": [rng.choice(options)]}, rng, root, depth)
    kind = schema.get("type") or ("object" if schema.get("properties") else "string")
    if isinstance(kind, list):
        kind = rng.choice(kind)
    match kind:
        case "array":
            least = schema.get("minItems", 1 if depth < _MAX_DEPTH else 0)
            count = min(least, schema.get("maxItems", least))
            return [
                _generate_value(schema.get("items"), rng, root, depth + 1) for _ in range(count)
            ]
        case "object":
            return _generate_object(schema, rng, root, depth)
        case "integer" | "number":
            return _generate_number(schema, rng, is_integer=kind == "integer")
        case "boolean":
            return rng.random() < 0.5
        case "null":
            return None
    return _generate_text(schema, rng)


def _generate_number(schema: Mapping[str, Any], rng: Random, *, is_integer: bool) -> float:
    """Without bounds, choose from 1 to 101."""
    low, above = _read_bound(schema, "minimum", "exclusiveMinimum")
    high, below = _read_bound(schema, "maximum", "exclusiveMaximum")
    if low is None:
        low = 1 if high is None or high >= 1 else high - 100
    if high is None:
        high = low + 100
    step = schema.get("multipleOf", 1 if is_integer else None)
    if step is None:
        edge = (high - low) / 1000
        return rng.uniform(low + edge * above, high - edge * below)
    first = floor(low / step) + 1 if above else ceil(low / step)
    last = ceil(high / step) - 1 if below else floor(high / step)
    value = round(step * rng.randint(min(first, last), last), 9)
    return int(value) if is_integer else value


def _read_bound(schema: Mapping[str, Any], closed: str, opened: str) -> tuple[float | None, bool]:
    """Return the bound and whether it is exclusive; older schemas have a boolean exclusiveMinimum."""
    if isinstance(at := schema.get(opened), bool) or at is None:
        return schema.get(closed), bool(at)
    return at, True


def _generate_text(schema: Mapping[str, Any], rng: Random) -> str:
    if schema.get("format") == "date":
        return f"{rng.randint(2024, 2026)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
    words = "".join(rng.choices(_SYLLABLES, k=max(2, -(-schema.get("minLength", 0) // 3))))
    return words[: schema.get("maxLength")]


def _inline(subschema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """Inline references and `allOf` into the schema."""
    if not isinstance(subschema, Mapping):
        return {}
    inlined = {key: value for key, value in subschema.items() if key not in ("$ref", "allOf")}
    parts = [_resolve(root, subschema["$ref"])] if "$ref" in subschema else []
    for part in (_inline(one, root) for one in (*parts, *subschema.get("allOf", ()))):
        properties = {**inlined.get("properties", {}), **part.get("properties", {})}
        required = [*inlined.get("required", ()), *part.get("required", ())]
        inlined |= {**part, "properties": properties, "required": required}
    return inlined


def _resolve(root: Mapping[str, Any], address: str) -> Any:
    """Resolve `#/$defs/Person` within the tool's own schema; a missing target allows anything."""
    target: Any = root
    for name in address.split("/")[1:]:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        target = target.get(name) if isinstance(target, Mapping) else None
    return target
