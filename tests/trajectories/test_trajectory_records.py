"""A record holds all of a trajectory, in plain JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from tests.trajectories.making import attempt

from skyfleet.chat.message import Image, Message, Text, ToolCall
from skyfleet.chat.transcript import Transcript
from skyfleet.tasks.task import Grade
from skyfleet.trajectories.records import RecordError, from_record, to_record
from skyfleet.trajectories.trajectory import Ending, Failure, Trajectory, Turn

ACTION = Message(
    role="assistant",
    content="I press.",
    reasoning="",
    tool_calls=(
        ToolCall(id="a", name="press", arguments={"by": [1, 2.5, None], "half": "\ud83d"}),
    ),
    malformed_calls=('{"name": ',),
)
REPLY = Message(role="tool", content="no", tool_call_id="a", is_error=True)
SCREEN = Message(role="user", content=(Text("see"), Image(b"\x00\xff", "image/jpeg"), Image(b"")))
FULL = Trajectory(
    task_key="t/1",
    env_key="git/hub",
    sample=3,
    prompt=(Message(role="system", content=""), SCREEN),
    turns=(
        Turn(action=ACTION, replies=(REPLY,), reward=0.1, engine_seconds=0.2, env_seconds=1 / 3),
        Turn(action=ACTION, replies=(), reward=0.0, engine_seconds=0.0, env_seconds=0.0),
    ),
    transcripts=(
        Transcript([5, 6, 7], [False, True, True], [0.0, -0.1, -1e-17], [4]),
        Transcript([], [], [], [], "the history was cut"),
    ),
    ending=Ending.TIMEOUT,
    grade=Grade(reward=0.5, success=False, parts={"sent": 0.5}, explanation="half"),
    failure=Failure(kind="EnvError", detail="the button fell off"),
    seconds=12.25,
)


@pytest.mark.parametrize("trajectory", [FULL, attempt(None), attempt(1.0)])
def test_a_trajectory_returns_from_json_as_it_was(trajectory: Trajectory) -> None:
    assert from_record(json.loads(json.dumps(to_record(trajectory)))) == trajectory


def test_types_survive_too() -> None:
    again = from_record(json.loads(json.dumps(to_record(FULL))))
    assert again.ending is Ending.TIMEOUT
    assert again.transcripts[0].loss_mask[1] is True
    assert again.prompt[1].content == SCREEN.content
    assert again.turns[0].action.reasoning == ""
    assert again.turns[0].action.tool_calls[0].arguments["by"] == [1, 2.5, None]


def test_info_and_finish_reason_are_recorded() -> None:
    first, *others = FULL.turns
    changed = replace(first, info={"presses": 2.0}, finish_reason="length")
    trajectory = replace(FULL, turns=(changed, *others))
    record = to_record(trajectory)
    assert record["turns"][0]["info"] == {"presses": 2.0}
    assert from_record(record) == trajectory


def test_a_record_from_before_info_and_finish_reason_is_read() -> None:
    record = to_record(FULL)
    assert "info" not in record["turns"][0]
    assert "finish_reason" not in record["turns"][0]
    turn = from_record(record).turns[0]
    assert (turn.info, turn.finish_reason) == ({}, None)


def test_a_record_of_another_version_is_refused() -> None:
    with pytest.raises(RecordError, match=r"version=1; this skyfleet reads version 2"):
        from_record({**to_record(FULL), "version": 1})


@pytest.mark.parametrize("value", [[1], 3, None, "text"])
def test_what_is_no_record_is_refused(value: Any) -> None:
    with pytest.raises(RecordError, match="is not a record; pass one"):
        from_record(value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("logprobs", [-0.1]),
        ("logprobs", [-0.1, -0.2, -0.3]),
        ("logprobs", "AAAAvw=="),
        ("chosen", [[1, 4]]),
        ("chosen", [[1, 3], [2, 3]]),
        ("token_ids", [5, 6]),
    ],
)
def test_tokens_and_logprobs_that_do_not_fit_are_refused(key: str, value: Any) -> None:
    record = to_record(FULL)
    record["transcripts"][0][key] = value
    with pytest.raises(RecordError, match=r"tokens, chosen=.* logprobs do not fit; pass a record"):
        from_record(record)


def test_a_record_with_a_missing_key_names_it() -> None:
    record = to_record(FULL)
    del record["turns"][1]["replies"]
    with pytest.raises(RecordError, match="replies"):
        from_record(record)
