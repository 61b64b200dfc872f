"""The teacher check: its pass rate decides; a failing endpoint decides nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.curation.planted_faults import good_tasks

from skyfleet.chat.message import Message, ToolSpec
from skyfleet.curation.inspection import open_inspectable
from skyfleet.curation.teacher import PassRateBand, Teacher, check_with_teacher
from skyfleet.curation.validate import check
from skyfleet.curation.verdict import Fault, Reason
from skyfleet.engines.http_client import RequestRejectedError
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.errors import EngineError, ModelError
from skyfleet.rollouts.scripted_agents import ReferenceModel
from skyfleet.tasks.task import Task


class ScriptedTeacher:
    """Replays the solution in its first `n_right` conversations and does nothing in the others."""

    def __init__(self, task: Task, n_right: int) -> None:
        self._task, self._n_right, self._started = task, n_right, 0
        self._agents: dict[int, ReferenceModel] = {}

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], sampling: SamplingParams
    ) -> Message:
        # Every conversation keeps one list of messages, whose id identifies it.
        if id(messages) not in self._agents:
            is_right = self._started < self._n_right
            self._started += 1
            self._agents[id(messages)] = ReferenceModel(self._task.solution if is_right else ())
        return await self._agents[id(messages)].reply(messages, tools, sampling)


class UnavailableTeacher:
    async def reply(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], sampling: SamplingParams
    ) -> Message:
        raise EngineError("503")


class RejectingTeacher(ScriptedTeacher):
    """Rejects every conversation after the first as too long."""

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], sampling: SamplingParams
    ) -> Message:
        if self._started and id(messages) not in self._agents:
            raise RequestRejectedError("refused with 400: context too long")
        return await super().reply(messages, tools, sampling)


class AlwaysRejectingTeacher(UnavailableTeacher):
    async def reply(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], sampling: SamplingParams
    ) -> Message:
        raise RequestRejectedError("refused with 400: context too long")


async def check_pass_rate(n_right: int, low: float, high: float) -> Fault | None:
    (task,) = good_tasks(github=1)
    teacher = Teacher(
        name="scripted",
        model=ScriptedTeacher(task, n_right),
        attempts=4,
        band=PassRateBand(low=low, high=high),
    )
    return await check_with_teacher(task, open_inspectable, teacher, timeout_seconds=5)


async def test_a_pass_rate_within_the_band_is_no_fault() -> None:
    assert await check_pass_rate(1, 0.25, 1.0) is None
    assert await check_pass_rate(4, 0.25, 1.0) is None


async def test_a_pass_rate_outside_the_band_is_a_fault() -> None:
    assert await check_pass_rate(0, 0.25, 1.0) == (
        Reason.TOO_HARD,
        "scripted passes 0 of 4, expected at least 25%",
    )
    assert await check_pass_rate(4, 0.25, 0.75) == (
        Reason.TOO_EASY,
        "scripted passes 4 of 4, expected at most 75%",
    )


async def test_a_teacher_that_cannot_be_called_is_an_error_and_no_fault() -> None:
    (task,) = good_tasks(github=1)
    teacher = Teacher(
        name="down", model=UnavailableTeacher(), attempts=2, band=PassRateBand(low=0.5, high=1)
    )
    with pytest.raises(ModelError, match=r"down could not be called for github-.*503.*--resume"):
        await check_with_teacher(task, open_inspectable, teacher, timeout_seconds=5)


async def test_a_teacher_replaces_a_missing_reference() -> None:
    (task,) = good_tasks(github=1)
    teacher = Teacher(
        name="p", model=ScriptedTeacher(task, 2), attempts=2, band=PassRateBand(low=0.5, high=1)
    )
    bare = task.model_copy(update={"solution": ()})
    assert await check(bare, open_inspectable, teacher, timeout_seconds=5) is None
    fault = await check(bare, open_inspectable, None, timeout_seconds=5)
    assert fault is not None
    assert fault[0] is Reason.UNVERIFIED
    vacuous = bare.model_copy(update={"verifier_code": "def verify(env):\n    return 1\n"})
    fault = await check(vacuous, open_inspectable, None, timeout_seconds=5)
    assert fault is not None
    assert fault[0] is Reason.VACUOUS, "what needs no reference is still checked"


async def test_an_attempt_without_a_grade_is_not_counted() -> None:
    (task,) = good_tasks(github=1)
    teacher = Teacher(
        name="c", model=RejectingTeacher(task, 1), attempts=3, band=PassRateBand(low=0.9, high=1)
    )
    assert await check_with_teacher(task, open_inspectable, teacher, timeout_seconds=5) is None
    teacher = Teacher(
        name="f", model=AlwaysRejectingTeacher(), attempts=3, band=PassRateBand(low=0.9, high=1)
    )
    fault = await check_with_teacher(task, open_inspectable, teacher, timeout_seconds=5)
    assert fault == (Reason.UNGRADED, "refused with 400: context too long")
