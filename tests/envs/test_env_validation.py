"""What an environment returns becomes plain Python values, and plain values are not copied."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from skyfleet.chat.message import Message, Text, ToolCall, ToolSpec
from skyfleet.envs.env import Observation, Step
from skyfleet.envs.message_validation import count_characters, cut_messages
from skyfleet.envs.validation import (
    parse_grade,
    validate_grade,
    validate_observation,
    validate_step,
)
from skyfleet.errors import EnvError, VerifierError
from skyfleet.tasks.task import Grade

USER = Message(role="user", content="hi")


class Scalar:
    """A number as torch returns it: without axes, with `item`."""

    shape = ()

    def __init__(self, value: object) -> None:
        self._value = value

    def item(self) -> object:
        return self._value


def test_plain_values_are_returned_as_they_are() -> None:
    step, observation = Step(messages=(USER,), reward=0.5), Observation(messages=(USER,))
    assert validate_step(step) is step
    assert validate_observation(observation) is observation


def test_numbers_of_other_libraries_become_pythons() -> None:
    odd: Any = Step(
        messages=[USER],  # type: ignore[arg-type]
        done=np.bool_(True),  # type: ignore[arg-type]
        reward=Scalar(0.5),  # type: ignore[arg-type]
        info={"a": np.float32(2), "b": Scalar(3), "c": "ignored"},  # type: ignore[dict-item]
        keep_recent_turns=np.int64(2),  # type: ignore[arg-type]
        success=np.array(False),  # type: ignore[arg-type]
    )
    step = validate_step(odd)
    assert step == Step(
        messages=(USER,),
        done=True,
        reward=0.5,
        info={"a": 2.0, "b": 3.0},
        keep_recent_turns=2,
        success=False,
    )
    types = [type(v) for v in (step.done, step.reward, step.keep_recent_turns, step.success)]
    assert types == [bool, float, int, bool]
    assert {type(value) for value in step.info.values()} == {float}


def test_a_grade_is_converted_in_all_its_fields() -> None:
    odd = Grade(reward=Scalar(1), success=np.bool_(True), parts={"a": np.int8(1)})  # type: ignore[arg-type, dict-item]
    grade = validate_grade(odd)
    assert grade == Grade(reward=1.0, success=True, parts={"a": 1.0})
    assert type(grade.parts["a"]) is float
    half: Any = np.array([0.5])
    assert parse_grade(half, by="f") == Grade(reward=0.5, success=False)


def test_a_schema_is_copied_into_plain_json() -> None:
    schema: dict[str, Any] = {"enum": (np.int64(1), "a"), "nested": {1: True}}
    tool = ToolSpec(name="t", description="", parameters=schema)
    (converted,) = validate_observation(Observation(messages=(USER,), tools=(tool,))).tools
    again = validate_observation(Observation(messages=(USER,), tools=(tool,))).tools
    schema["later"] = object()
    assert converted.parameters == {"enum": [1, "a"], "nested": {"1": True}}
    assert again == (converted,)
    with pytest.raises(EnvError, match="tool t: parameters has <object object"):
        validate_observation(Observation(messages=(USER,), tools=(tool,)))


@pytest.mark.parametrize("new", [["Oslo"], [True], [1.0], ("Rome",), [np.int64(1)]])
@pytest.mark.parametrize("old", [["Rome"], [1]])
def test_a_schema_that_the_environment_changed_is_read_again(old: list[Any], new: Any) -> None:
    schema: dict[str, Any] = {"properties": {"city": {"enum": old}}}
    tools = (ToolSpec(name="go", description="d", parameters=schema),)

    def read() -> Any:
        (tool,) = validate_observation(Observation(messages=(USER,), tools=tools)).tools
        return tool.parameters["properties"]["city"]["enum"]

    assert repr(read()) == repr(old)
    schema["properties"]["city"]["enum"] = new
    plain = [each.item() if isinstance(each, np.generic) else each for each in new]
    assert repr(read()) == repr(plain)


def test_tools_of_the_same_contents_are_checked_once() -> None:
    def read(tools: Any) -> Any:
        return validate_observation(Observation(messages=(USER,), tools=tools)).tools

    first, again = (
        (ToolSpec(name="go", description="d", parameters={"n": [1, "".join(["a", "b"])]}),)
        for _ in range(2)
    )
    assert read(first) is read(again) is read(list(again))
    assert read(first) is not first


LONG = "word " * 100_000


@pytest.mark.parametrize(
    "message",
    [
        Message(role="assistant", tool_calls=(ToolCall(id="1", name="f", arguments={"a": LONG}),)),
        Message(role="assistant", tool_calls=(ToolCall(id="1", name="f", arguments={LONG: [1]}),)),
        Message(role="assistant", tool_calls=(ToolCall(id=LONG, name="f", arguments={}),)),
        Message(role="assistant", tool_calls=(ToolCall(id="1", name=LONG, arguments={}),)),
        Message(role="assistant", malformed_calls=("short", LONG)),
        Message(role="tool", tool_call_id=LONG),
        Message(role="assistant", reasoning=LONG),
        Message(role="tool", content=(Text("a"), Text(LONG))),
    ],
)
def test_everything_in_a_message_is_counted_and_cut(message: Message) -> None:
    assert len(LONG) <= count_characters((message,)) < len(LONG) + 100
    cut = cut_messages((USER, message, USER), 1_000)
    assert 1_000 <= count_characters(cut) < 1_200
    assert count_characters(cut_messages((message, message), 1_000)) < 1_200
    assert validate_step(Step(messages=cut)).messages == cut


def test_tools_are_counted_with_their_schemas() -> None:
    tools = (
        ToolSpec(name="a", description=LONG, parameters={}),
        ToolSpec(name="b", description="", parameters={"note": LONG}),
        ToolSpec(name="c", description="", parameters={LONG: 1}),
    )
    messages = (Message(role="user", content="hello"),)
    for _ in range(2):
        assert 3 * len(LONG) < count_characters(messages, tools) < 3 * len(LONG) + 100


@pytest.mark.parametrize(
    "arguments",
    [{"x" * 1_000_001: 1}, {"a": [10**4000] * 300}, {f"{i:0>9}": 1 for i in range(120_000)}],
    ids=["key", "numbers", "keys"],
)
def test_keys_and_long_numbers_count_to_the_size_of_a_json_object(
    arguments: dict[str, Any],
) -> None:
    call = ToolCall(id="1", name="x", arguments=arguments)
    with pytest.raises(EnvError, match="larger than 1,000,000 characters"):
        validate_step(Step(messages=(Message(role="assistant", tool_calls=(call,)),)))


def test_errors_name_the_method_the_field_and_the_value() -> None:
    with pytest.raises(EnvError, match=r"^step\(\): a message's content is 7; return a text"):
        validate_step(Step(messages=(Message(role="user", content=7),)))  # type: ignore[arg-type]
    with pytest.raises(VerifierError, match=r"^grade\(\): parts\['a'\] is nan; return a finite"):
        validate_grade(Grade(reward=1.0, success=True, parts={"a": math.nan}))
    call = ToolCall(id="1", name="x", arguments={"a": {1}})
    with pytest.raises(EnvError, match=r"tool call arguments has \{1\}, which is not JSON"):
        validate_step(Step(messages=(Message(role="assistant", tool_calls=(call,)),)))


def test_long_messages_are_counted_and_cut_to_their_beginning() -> None:
    messages = (USER, Message(role="tool", content=(Text("abc"), Text("def"))), USER)
    assert count_characters(messages) == 10
    first, second = cut_messages(messages, 5)
    assert first == USER
    assert second.text == "abc\n(cut: the first 3 of 6 characters)"
