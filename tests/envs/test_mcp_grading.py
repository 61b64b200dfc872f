"""Graders for MCP episodes return a grade or say why it is unknown."""

from __future__ import annotations

import asyncio
import threading
from base64 import b64encode
from collections.abc import Sequence
from contextlib import closing
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.fakes.counter_env import TASK

from skyfleet.chat.message import Message
from skyfleet.envs.mcp.grading import FinishedEpisode, by_function, by_verifier
from skyfleet.envs.mcp.session import Session
from skyfleet.envs.verifiers.run_verifier import load_state
from skyfleet.errors import VerifierError
from skyfleet.tasks.task import Grade, Task

MESSAGES = (Message(role="user", content="count"), Message(role="assistant", content="three"))
gives: Any = None
"""What the reward functions below return."""
threads: list[int] = []


def plain(task: Task, messages: Sequence[Message]) -> Any:
    threads.append(threading.get_ident())
    return gives


async def awaited(task: Task, messages: Sequence[Message]) -> Any:
    await asyncio.sleep(0)
    return gives


class _Resources:
    """A session that offers one database as every resource."""

    async def read(self, uri: str) -> Any:
        with closing(load_state(b"")) as state:
            state.execute("create table t (a)")
            blob = b64encode(state.serialize()).decode()
        return SimpleNamespace(contents=[SimpleNamespace(blob=blob)])


def _played(task: Task = TASK) -> FinishedEpisode:
    return FinishedEpisode(task=task, messages=MESSAGES, session=cast("Session", _Resources()))


@pytest.mark.parametrize("name", ["plain", "awaited"])
async def test_a_reward_function_may_be_async(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    grade = by_function(f"{__name__}:{name}")
    partly = Grade(reward=0.5, success=False)
    for given, expected in [(1, Grade(reward=1.0, success=True)), (partly, partly), (None, None)]:
        monkeypatch.setattr(f"{__name__}.gives", given)
        assert await grade(_played()) == expected


async def test_a_reward_function_that_blocks_does_not_block_other_episodes() -> None:
    threads.clear()
    await by_function(f"{__name__}:plain")(_played())
    assert threads != [threading.get_ident()]


@pytest.mark.parametrize("name", ["plain", "awaited"])
@pytest.mark.parametrize(
    "given",
    [float("nan"), float("inf"), Grade(reward=float("nan"), success=False), "1", 10**400],
    ids=["nan", "inf", "grade", "text", "huge"],
)
async def test_a_reward_that_is_no_finite_number_is_refused(
    name: str, given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.gives", given)
    with pytest.raises(
        VerifierError, match=rf"reward='.*:{name}' returned .*; return a finite number"
    ):
        await by_function(f"{__name__}:{name}")(_played())


async def test_a_verifier_reads_the_conversation() -> None:
    code = (
        "def validate_task(env, final_answer=None, conversation=None):\n"
        "    said = [(turn['role'], turn['content']) for turn in json.loads(conversation)]\n"
        "    return int(said == [('user', 'count'), ('assistant', 'three')])\n"
    )
    task = TASK.model_copy(update={"verifier_code": code})
    grade = await by_verifier(seed_uri="state://a", current_uri="state://b")(_played(task))
    assert grade is not None
    assert grade.reward == 1.0
