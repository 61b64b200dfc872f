"""Validation by execution and mutation testing."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from tests.curation.planted_faults import good_tasks

from skyfleet.chat.message import Message, ToolSpec
from skyfleet.curation.inspection import open_inspectable
from skyfleet.curation.replay import EXPECTED_ERRORS, mutate_value, replay
from skyfleet.curation.verdict import Fault, Reason
from skyfleet.envs.env import Observation, Step
from skyfleet.errors import VerifierError
from skyfleet.tasks.task import Grade, RecordedCall, Task

NOTE = ToolSpec(
    name="note",
    description="",
    parameters={"properties": {"text": {"type": "string"}, "page": {"type": "integer"}}},
)


@dataclass
class Notebook:
    """Passes if a note contains `wanted`; its state is not inspectable."""

    wanted: str
    noted: list[str] = field(default_factory=list)

    async def reset(self) -> Observation:
        return Observation(messages=(Message(role="user", content="note it"),), tools=(NOTE,))

    async def step(self, action: Message) -> Step:
        self.noted += [str(call.arguments.get("text")) for call in action.tool_calls]
        return Step(messages=(Message(role="tool", content="ok"),), done="<done>" in action.text)

    async def grade(self) -> Grade:
        passed = any(self.wanted in note for note in self.noted)
        return Grade(reward=float(passed), success=passed)

    async def close(self) -> None: ...


def make_task(text: str) -> Task:
    call = RecordedCall(name="note", arguments={"text": text, "page": 2})
    return Task(key="n", env_key="notebook", prompt="p", solution=(call,))


async def check(task: Task, wanted: str) -> Fault | None:
    async def open_notebook(task: Task) -> Notebook:
        return Notebook(wanted)

    return await replay(task, open_notebook, timeout_seconds=5)


async def test_an_irrelevant_argument_is_no_fault_if_final_states_cannot_be_compared() -> None:
    # Another page passes; another date does not.
    assert await check(make_task("2026-03-04"), wanted="2026-03-04") is None


async def test_a_verifier_that_notices_no_mutant_is_a_fault_even_without_a_state() -> None:
    fault = await check(make_task("2026-03-04"), wanted="2026")
    assert fault == (Reason.MUTANT_PASSES, "note(text='2026-03-04' -> '2026-03-05')")


async def test_a_task_that_random_calls_pass_is_a_fault() -> None:
    fault = await check(make_task("one two"), wanted="")
    assert fault is not None
    assert fault[0] in (Reason.MUTANT_PASSES, Reason.RANDOM_PASSES)


class StrictNotebook(Notebook):
    async def grade(self) -> Grade:
        if self.noted and self.wanted not in self.noted:
            raise VerifierError("AssertionError: wrong note")
        return await super().grade()


async def test_a_mutant_without_a_grade_is_a_fault() -> None:
    async def open_notebook(task: Task) -> Notebook:
        return StrictNotebook("2026-03-04")

    fault = await replay(make_task("2026-03-04"), open_notebook, timeout_seconds=5)
    assert fault is not None
    assert fault[0] is Reason.UNGRADED
    assert fault[1].startswith("note(text='2026-03-04' -> '2026-03-05') returns no grade: ")


async def test_expected_errors_are_no_fault_and_missing_ones_are() -> None:
    tasks = good_tasks(github=60)
    expecting = next(task for task in tasks if task.metadata[EXPECTED_ERRORS])
    assert await replay(expecting, open_inspectable, timeout_seconds=5) is None
    unexpected = expecting.model_copy(update={"metadata": {}})
    fault = await replay(unexpected, open_inspectable, timeout_seconds=5)
    assert fault is not None
    assert fault[0] is Reason.WRONG_CALL
    assert fault[1].startswith("0 errors expected, got: Error: ")
    plain = next(task for task in tasks if not task.metadata[EXPECTED_ERRORS])
    fault = await replay(
        plain.model_copy(update={"metadata": {EXPECTED_ERRORS: 1}}),
        open_inspectable,
        timeout_seconds=5,
    )
    assert fault == (Reason.WRONG_CALL, "1 errors expected, got: no error")


async def test_a_mutant_with_the_final_state_of_the_reference_is_no_fault() -> None:
    # The second assignment overwrites the first: the final state does not depend on it.
    task = next(
        task
        for task in good_tasks(github=60)
        if task.metadata["template"] == "assign_oldest" and len(task.solution) == 2
    )
    look, write = task.solution
    assert "assignee" in write.arguments
    twice = task.model_copy(update={"solution": (look, write, write)})
    assert await replay(twice, open_inspectable, timeout_seconds=5) is None


@pytest.mark.parametrize(
    ("value", "schema", "wrong"),
    [
        ("open", {"enum": ["open", "closed"]}, "closed"),
        (True, {}, False),
        (7, {}, 8),
        (1.5, {}, 2.5),
        ("41", {}, "42"),
        ("2026-02-28", {}, "2026-03-01"),
        ("Ana", {}, "zorqua Ana"),
        (["a", "b"], {}, ["zorqua a", "b"]),
        ([{"a": None}, {"a": 1}], {}, [{"a": None}, {"a": 2}]),
        ({"to": {"name": "Ana"}, "n": 1}, {}, {"to": {"name": "zorqua Ana"}, "n": 1}),
        ({"s": "on"}, {"properties": {"s": {"enum": ["on", "off"]}}}, {"s": "off"}),
        (None, {}, None),
        ([None], {}, None),
        ({}, {}, None),
    ],
)
def test_a_mutated_value_has_the_same_type(
    value: object, schema: dict[str, object], wrong: object
) -> None:
    assert mutate_value(value, schema) == wrong
