"""The random agent calls tools as their schemas allow, reproducibly per seed."""

from __future__ import annotations

from random import Random
from typing import Any

import jsonschema
import pytest
from tests.fakes.counter_env import TASK, CounterEnv, make_factory

from skyfleet.chat.message import Message, ToolCall
from skyfleet.envs.agentdojo.env import open_agentdojo
from skyfleet.envs.agentdojo.tasks import agentdojo_tasks
from skyfleet.rollouts.episode import Limits, collect
from skyfleet.rollouts.random_agent import RANDOM_CALLS, random_object, random_policy
from skyfleet.trajectories.trajectory import Ending, Trajectory
from skyfleet.worlds.catalog import WORLD_NAMES, generate_world_tasks, get_world, open_world

LIMITS = Limits(max_turns=12, max_input_length=0, trajectory_timeout_seconds=0)
PERSON: dict[str, Any] = {
    "type": "object",
    "required": ["name", "age", "kind", "born", "friends", "mood"],
    "properties": {
        "name": {"type": "string", "minLength": 9, "maxLength": 10},
        "age": {"type": "integer", "minimum": 3, "maximum": 5},
        "height": {"type": "number", "exclusiveMinimum": 0.5, "maximum": 0.6},
        "low": {"type": "integer", "maximum": -2},
        "kind": {"const": "person"},
        "born": {"type": "string", "format": "date", "pattern": r"^\d{4}-\d\d-\d\d$"},
        "friends": {"type": "array", "minItems": 2, "items": {"$ref": "#/$defs/friend"}},
        "mood": {"anyOf": [{"type": "null"}, {"enum": ["good", "bad"]}]},
        "note": {"type": ["string", "null"]},
    },
    "$defs": {
        "friend": {
            "type": "object",
            "required": ["close"],
            "properties": {"close": {"type": "boolean"}, "of": {"$ref": "#/$defs/friend"}},
        }
    },
}


async def played(seed: int, n_samples: int = 1) -> list[Trajectory]:
    tasks = generate_world_tasks("github", split="all", count=2)
    policy = random_policy(seed=seed)
    groups = await collect(tasks, open_world, policy, LIMITS, n_samples=n_samples, max_concurrent=4)
    return [trajectory for group in groups for trajectory in group.trajectories]


def calls(trajectory: Trajectory) -> list[tuple[ToolCall, ...]]:
    return [turn.action.tool_calls for turn in trajectory.turns]


@pytest.mark.parametrize("world", WORLD_NAMES)
def test_arguments_keep_to_the_schema_of_every_tool_of_a_world(world: str) -> None:
    rng = Random(1)
    for tool in get_world(world).toolkit.specs:
        for _ in range(20):
            jsonschema.validate(random_object(tool.parameters, rng), dict(tool.parameters))


async def test_arguments_keep_to_the_schemas_of_agentdojos_tools() -> None:
    rng = Random(2)
    (task, *_) = agentdojo_tasks("workspace")
    for tool in (await (await open_agentdojo(task)).reset()).tools:
        for _ in range(20):
            jsonschema.validate(random_object(tool.parameters, rng), dict(tool.parameters))


def test_arguments_keep_to_bounds_choices_and_references() -> None:
    rng = Random(3)
    made = [random_object(PERSON, rng) for _ in range(200)]
    for person in made:
        jsonschema.validate(person, PERSON)
    assert {person["age"] for person in made} == {3, 4, 5}
    assert {"note" in person for person in made} == {True, False}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": True},
        {"type": "array", "maxItems": 0},
        True,
        {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 2},
        {"type": "integer", "minimum": 5, "multipleOf": 5},
        {"type": "integer", "maximum": -250},
        {"type": "number", "minimum": 0, "exclusiveMaximum": 0.01},
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        {"type": "number", "minimum": 1, "multipleOf": 0.5},
        {"allOf": [{"type": "integer"}, {"minimum": 70}]},
        {"$ref": "#/$defs/x~1y"},
        {"allOf": [{"$ref": "#/$defs/x~1y"}], "description": "as pydantic writes it"},
        {"type": "object", "properties": {"b": True}, "anyOf": [{"required": ["b"]}]},
        {
            "allOf": [
                {"properties": {"b": {"type": "integer"}}, "required": ["b"]},
                {"properties": {"c": {"const": 1}}, "required": ["c"], "type": "object"},
            ]
        },
    ],
)
def test_unusual_schemas_are_respected(schema: Any) -> None:
    rng = Random(5)
    whole = {
        "type": "object",
        "properties": {"a": schema},
        "required": ["a"],
        "$defs": {"x/y": {"type": "integer", "maximum": 3}},
    }
    for _ in range(100):
        jsonschema.validate(random_object(whole, rng), whole)


def test_older_schemas_say_with_a_flag_that_a_bound_is_excluded_and_list_their_items() -> None:
    listed = {"type": "array", "items": [{"type": "string"}, {"type": "string"}]}
    whole: dict[str, Any] = {"type": "object", "properties": {"a": listed}, "required": ["a"]}
    assert len(random_object(whole, Random(0))["a"]) == 1
    number = {"type": "integer", "minimum": 0, "exclusiveMinimum": True, "maximum": 1}
    whole["properties"] = {"a": number}
    assert {random_object(whole, Random(i))["a"] for i in range(20)} == {1}


def test_a_tool_may_refer_to_all_of_its_parameters() -> None:
    whole = {"$ref": "#/$defs/P", "$defs": {"P": PERSON["$defs"]["friend"]}}
    assert "close" in random_object(whole, Random(0))
    nowhere = {"type": "object", "properties": {"a": {"$ref": "#/gone"}}, "required": ["a"]}
    assert isinstance(random_object(nowhere, Random(0))["a"], str)


async def test_it_makes_eight_calls_and_declares_that_it_is_done() -> None:
    for trajectory in await played(seed=0):
        if trajectory.ending is Ending.DONE and len(trajectory.turns) == RANDOM_CALLS + 1:
            assert calls(trajectory)[-1] == ()
            break
    else:
        pytest.fail("no episode went on to its end")


async def test_the_same_seed_makes_the_same_calls_and_attempts_differ() -> None:
    first, again, other = await played(seed=4, n_samples=2), await played(4, 2), await played(5, 2)
    assert [calls(t) for t in first] == [calls(t) for t in again]
    assert [calls(t) for t in first] != [calls(t) for t in other]
    assert calls(first[0]) != calls(first[1])


async def test_without_tools_it_declares_that_it_is_done() -> None:

    (group,) = await collect(
        [TASK],
        make_factory(CounterEnv()),
        random_policy(seed=0),
        LIMITS,
        n_samples=1,
        max_concurrent=1,
    )
    assert [turn.action for turn in group.trajectories[0].turns] == [
        Message(role="assistant", content="<done>")
    ]
