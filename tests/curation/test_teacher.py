"""A teacher's pass rate decides; a teacher that cannot be asked decides nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.curation.planted_faults import good_tasks

from skyfleet.chat.message import Message, ToolSpec
from skyfleet.curation.inspecting import open_inspected
from skyfleet.curation.teacher import Band, Teacher, teach
from skyfleet.curation.validate import check
from skyfleet.curation.verdict import Fault, Reason
from skyfleet.engines.http_client import RefusedError
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.errors import EngineError, ModelError
from skyfleet.rollouts.scripted_agents import ReferenceModel
from skyfleet.tasks.task import Task


class Pupil:
    """Knows the solution of the first `right` conversations that it is in."""

    def __init__(self, task: Task, right: int) -> None:
        self._task, self._right, self._begun = task, right, 0
        self._minds: dict[int, ReferenceModel] = {}

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], sampling: SamplingParams
    ) -> Message:
        # Every conversation has a list of its own, which stays the same one.
        if id(messages) not in self._minds:
            knows = self._begun < self._right
            self._begun += 1
            self._minds[id(messages)] = ReferenceModel(self._task.solution if knows else ())
        return await self._minds[id(messages)].reply(messages, tools, sampling)


class Silent:
    async def reply(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], sampling: SamplingParams
    ) -> Message:
        raise EngineError("503")


class Choosy(Pupil):
    """Refuses every conversation after the first, as too long."""

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], sampling: SamplingParams
    ) -> Message:
        if self._begun and id(messages) not in self._minds:
            raise RefusedError("refused with 400: context too long")
        return await super().reply(messages, tools, sampling)


class Full(Silent):
    async def reply(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], sampling: SamplingParams
    ) -> Message:
        raise RefusedError("refused with 400: context too long")


async def taught(right: int, low: float, high: float) -> Fault | None:
    (task,) = good_tasks(github=1)
    teacher = Teacher(
        name="pupil", model=Pupil(task, right), attempts=4, band=Band(low=low, high=high)
    )
    return await teach(task, open_inspected, teacher, timeout_seconds=5)


async def test_a_pass_rate_within_the_band_is_no_fault() -> None:
    assert await taught(1, 0.25, 1.0) is None
    assert await taught(4, 0.25, 1.0) is None


async def test_a_pass_rate_outside_the_band_is_a_fault() -> None:
    assert await taught(0, 0.25, 1.0) == (
        Reason.TOO_HARD,
        "pupil passes 0 of 4, wanted at least 25%",
    )
    assert await taught(4, 0.25, 0.75) == (
        Reason.TOO_EASY,
        "pupil passes 4 of 4, wanted at most 75%",
    )


async def test_a_teacher_that_cannot_be_called_is_an_error_and_no_fault() -> None:
    (task,) = good_tasks(github=1)
    teacher = Teacher(name="silent", model=Silent(), attempts=2, band=Band(low=0.5, high=1))
    with pytest.raises(ModelError, match=r"silent could not be asked about github-.*503.*--resume"):
        await teach(task, open_inspected, teacher, timeout_seconds=5)


async def test_a_teacher_replaces_a_missing_reference() -> None:
    (task,) = good_tasks(github=1)
    teacher = Teacher(name="p", model=Pupil(task, 2), attempts=2, band=Band(low=0.5, high=1))
    bare = task.model_copy(update={"solution": ()})
    assert await check(bare, open_inspected, teacher, timeout_seconds=5) is None
    fault = await check(bare, open_inspected, None, timeout_seconds=5)
    assert fault is not None
    assert fault[0] is Reason.NO_REFERENCE


async def test_an_attempt_without_a_grade_is_not_counted() -> None:
    (task,) = good_tasks(github=1)
    teacher = Teacher(name="c", model=Choosy(task, 1), attempts=3, band=Band(low=0.9, high=1))
    assert await teach(task, open_inspected, teacher, timeout_seconds=5) is None
    teacher = Teacher(name="f", model=Full(), attempts=3, band=Band(low=0.9, high=1))
    fault = await teach(task, open_inspected, teacher, timeout_seconds=5)
    assert fault == (Reason.UNGRADED, "refused with 400: context too long")
