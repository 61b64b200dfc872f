"""Episodes of a world: calls run in order, and no agent output can break them."""

from __future__ import annotations

import sqlite3
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyfleet.chat.message import Message, ToolCall
from skyfleet.errors import EnvError, VerifierError
from skyfleet.tasks.task import Task
from skyfleet.worlds.catalog import WORLD_NAMES, generate_world_tasks, get_world
from skyfleet.worlds.env import WorldEnv


def _task(template: str, world: str = "github") -> Task:
    tasks = generate_world_tasks(world, split="all", count=12)
    return next(task for task in tasks if task.metadata["template"] == template)


def _env(task: Task) -> WorldEnv:
    return WorldEnv(get_world(task.env_key), task)


def _calls(*calls: tuple[str, dict[str, Any]], text: str = "") -> Message:
    made = [ToolCall(id=f"c{i}", name=n, arguments=a) for i, (n, a) in enumerate(calls)]
    return Message(role="assistant", content=text, tool_calls=tuple(made))


def _solution(task: Task) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, call.arguments) for call in task.solution]


async def test_the_first_observation_has_the_date_the_user_and_the_tools() -> None:
    task = _task("close_by_title")
    variables = {"CURRENT_DATE": "2026-03-02", "LOGGED_IN_USER": "zoe"}
    env = _env(task.model_copy(update={"env_variables": variables}))
    observation = await env.reset()
    await env.close()
    system, user = observation.messages
    assert user.text.startswith("You help zoe in github. Today is Monday, 2026-03-02.\n")
    assert user.text.endswith(task.prompt)
    assert "zoe" not in system.text, "the system prompt is the same for every task of a world"
    assert [tool.name for tool in observation.tools] == [
        "list_issues",
        "get_issue",
        "update_issue",
        "create_comment",
        "add_label",
        "create_label",
    ]


async def test_all_calls_of_a_turn_run_in_order_and_done_in_the_same_turn_ends_it() -> None:
    task = _task("close_by_title")
    env = _env(task)
    await env.reset()
    step = await env.step(_calls(*_solution(task), text="That is all. <DONE>"))
    assert step.done
    assert [message.tool_call_id for message in step.messages] == ["c0", "c1"]
    assert {message.role for message in step.messages} == {"tool"}
    assert (await env.grade()).success
    await env.close()


async def test_bracketed_done_ends_the_episode_and_later_calls_do_not_run() -> None:
    env = _env(_task("close_by_title"))
    await env.reset()
    assert (await env.step(Message(role="assistant", content="[Done]"))).done
    with pytest.raises(EnvError, match="after done"):
        await env.step(Message(role="assistant", content="more"))
    await env.close()


async def test_submitting_an_answer_ends_the_episode_and_only_questions_offer_it() -> None:
    task = _task("count_assigned")
    env = _env(task)
    observation = await env.reset()
    assert observation.tools[-1].name == "submit_final_answer"
    step = await env.step(_calls(("submit_final_answer", {"answer": "99"})))
    assert step.done
    assert not (await env.grade()).success
    await env.close()
    other = _env(_task("close_by_title"))
    await other.reset()
    step = await other.step(_calls(("submit_final_answer", {"answer": "1"})))
    assert not step.done
    assert "no tool 'submit_final_answer'; tools: list_issues" in step.messages[0].text
    await other.close()


async def test_listing_every_candidate_fails() -> None:
    env = _env(_task("who_has_it"))
    await env.reset()
    everyone = "amy bob carol dan eve frank grace henry"
    await env.step(_calls(("submit_final_answer", {"answer": everyone})))
    assert not (await env.grade()).success
    await env.close()


async def test_a_turn_without_a_tool_call_gets_a_reminder() -> None:
    env = _env(_task("close_by_title"))
    await env.reset()
    step = await env.step(Message(role="assistant", content="I will look."))
    assert (step.done, step.messages[0].role) == (False, "user")
    assert step.messages[0].text.startswith("Error: no tool call")
    step = await env.step(Message(role="assistant", malformed_calls=("{bad",)))
    assert (step.done, step.messages[0].role) == (False, "user")
    assert "not valid JSON" in step.messages[0].text
    await env.close()


async def test_a_tool_error_is_an_observation_and_the_episode_continues() -> None:
    task = _task("close_by_title")
    env = _env(task)
    await env.reset()
    step = await env.step(_calls(("get_issue", {"number": 1000}), ("close", {})))
    assert [message.is_error for message in step.messages] == [True, True]
    assert step.messages[0].text == "Error: no issue 1000; list_issues shows the numbers"
    await env.step(_calls(*_solution(task), text="<done>"))
    assert (await env.grade()).success
    await env.close()


async def test_an_additional_change_fails() -> None:
    task = _task("close_by_title")
    env = _env(task)
    await env.reset()
    number = task.solution[-1].arguments["number"]
    extra = ("create_comment", {"number": number, "body": "closed it"})
    await env.step(_calls(*_solution(task), extra, text="<done>"))
    grade = await env.grade()
    assert (grade.reward, grade.success) == (0.0, False)
    assert '>>> ERROR_ACCUMULATOR >>>\n["[X] unexpected insert comments' in grade.explanation
    await env.close()


async def test_a_broken_or_absent_verifier_gives_no_grade() -> None:
    task = _task("close_by_title")
    for code in ("def validate_task(env): return undefined", None):
        env = _env(task.model_copy(update={"verifier_code": code}))
        await env.reset()
        with pytest.raises(VerifierError, match="verifier_code"):
            await env.grade()
        await env.close()


async def test_close_frees_the_database_and_may_be_called_twice() -> None:
    env = _env(_task("close_by_title"))
    await env.close()
    await env.reset()
    connection = env._open_app.db.connection
    await env.close()
    await env.close()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connection.execute("select 1")
    with pytest.raises(EnvError, match="not open"):
        await env.step(Message(role="assistant", content="<done>"))


async def test_two_episodes_of_a_task_are_independent() -> None:
    task = _task("close_by_title")
    one, two = _env(task), _env(task)
    await one.reset()
    await two.reset()
    await one.step(_calls(*_solution(task)))
    assert (await one.grade()).success
    assert not (await two.grade()).success
    await one.close()
    await two.close()


def test_an_invalid_data_key_is_rejected() -> None:
    task = _task("close_by_title").model_copy(update={"data_key": "kinesis"})
    with pytest.raises(EnvError, match="data_key='kinesis'; write seed-<number>"):
        _env(task)


_VALUES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers())
)
_NAMES = {spec.name for name in WORLD_NAMES for spec in get_world(name).toolkit.specs}
_PARAMETERS = {
    parameter
    for name in WORLD_NAMES
    for spec in get_world(name).toolkit.specs
    for parameter in spec.parameters["properties"]
}


@given(
    world=st.sampled_from(WORLD_NAMES),
    name=st.sampled_from(sorted(_NAMES)) | st.text(),
    arguments=st.dictionaries(st.sampled_from(sorted(_PARAMETERS)) | st.text(), _VALUES),
)
async def test_no_call_can_break_a_world(world: str, name: str, arguments: dict[str, Any]) -> None:
    env = _env(generate_world_tasks(world, split="all", count=1)[0])
    await env.reset()
    step = await env.step(_calls((name, arguments)))
    (reply,) = step.messages
    assert reply.text.encode()
    assert reply.is_error == reply.text.startswith("Error: ")
    await env.close()


CONVERSATION_VERIFIER = """
def validate_task(env, final_answer=None, conversation=None):
    import json
    turns = [(turn["role"], turn["content"]) for turn in json.loads(conversation)]
    call = ("assistant", '{"name": "list_issues", "arguments": {"repo": "nowhere"}}')
    return 1 if call in turns and turns[-1] == ("assistant", "<done>") else 0
"""

PARTIAL_VERIFIER = """
def validate_task(env):
    print(">>> ERROR_ACCUMULATOR >>>\\n['no label']\\n<<< ERROR_ACCUMULATOR <<<")
    print(">>> SUCCESS_ACCUMULATOR >>>\\n['one', 'two', 'three']\\n<<< SUCCESS_ACCUMULATOR <<<")
    return 0
"""


async def test_a_verifier_with_a_conversation_parameter_receives_the_conversation() -> None:
    env = _env(_task("close_by_title").model_copy(update={"verifier_code": CONVERSATION_VERIFIER}))
    await env.reset()
    await env.step(_calls(("list_issues", {"repo": "nowhere"})))
    await env.step(Message(role="assistant", content="<done>"))
    assert (await env.grade()).success
    await env.close()


async def test_partial_credit_is_the_share_of_passed_checks_if_enabled() -> None:
    task = _task("close_by_title").model_copy(update={"verifier_code": PARTIAL_VERIFIER})
    rewards = []
    for partial_credit in (False, True):
        env = WorldEnv(get_world("github"), task, partial_credit=partial_credit)
        await env.reset()
        rewards.append((await env.grade()).reward)
        await env.close()
    assert rewards == [0.0, 0.75]


@pytest.mark.parametrize("given", [{}, {"LOGGED_IN_USER": "zoe"}, {"COLOUR": "red"}])
def test_missing_env_variables_default_to_those_of_the_data(
    given: dict[str, str],
) -> None:
    world = get_world("github")
    known = world.variables(3) | given
    app = world.open(3, given)
    assert (app.current_date, app.user) == (known["CURRENT_DATE"], known["LOGGED_IN_USER"])
    app.db.close()
