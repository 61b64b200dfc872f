"""AgentDojo's tasks run with its own tools and are graded by its own checks."""

from __future__ import annotations

import subprocess
import sys

import pytest

from skyfleet.chat.message import Message, ToolCall
from skyfleet.envs.agentdojo.env import AgentDojoEnv, open_agentdojo
from skyfleet.envs.agentdojo.suites import load_dojo
from skyfleet.envs.agentdojo.tasks import agentdojo_tasks
from skyfleet.errors import ConfigError, EnvError, MissingExtraError, VerifierError
from skyfleet.rollouts.conversation import AgentFactory
from skyfleet.rollouts.episode import Limits, run_episode
from skyfleet.rollouts.scripted_agents import null_policy, oracle_policy
from skyfleet.tasks.task import Task

LIMITS = Limits(max_turns=40, max_input_length=1_000_000, trajectory_timeout_seconds=30)


def _call(name: str, **arguments: object) -> Message:
    call = ToolCall(id="call_0", name=name, arguments=arguments)
    return Message(role="assistant", tool_calls=(call,))


def _task(suite: str, number: int) -> Task:
    key = f"agentdojo-{suite}-user_task_{number}"
    return next(task for task in agentdojo_tasks(suite) if task.key == key)


async def _opened(task: Task) -> AgentDojoEnv:
    env = await open_agentdojo(task)
    await env.reset()
    return env


async def _passed(tasks: list[Task], policy: AgentFactory) -> list[str]:
    played = [await run_episode(task, open_agentdojo, policy, LIMITS) for task in tasks]
    assert [episode.failure for episode in played] == [None] * len(tasks)
    return [episode.task_key.rpartition("_")[2] for episode in played if episode.reward == 1.0]


# Of those five checks two find a payment that was there from the start, one checks nothing, and two
# ask that nothing be changed.
@pytest.mark.parametrize(
    ("suite", "count", "passed_by_doing_nothing"),
    [
        pytest.param("workspace", 40, [], marks=pytest.mark.exhaustive),  # as slow as the others
        ("travel", 20, []),
        ("banking", 16, ["5", "6", "8", "9", "10"]),
        ("slack", 21, []),
    ],
)
async def test_reference_calls_score_one_and_doing_nothing_scores_what_it_scores(
    suite: str, count: int, passed_by_doing_nothing: list[str]
) -> None:
    tasks = agentdojo_tasks(suite)
    assert len(tasks) == count
    assert len(await _passed(tasks, oracle_policy)) == count
    assert await _passed(tasks, null_policy) == passed_by_doing_nothing


def test_all_suites_together_have_ninety_seven_tasks_with_keys_of_their_own() -> None:
    tasks = agentdojo_tasks()
    assert len({task.key for task in tasks}) == len(tasks) == 97
    assert {task.env_key for task in tasks} == {
        f"agentdojo-{suite}" for suite in ("workspace", "travel", "banking", "slack")
    }


async def test_the_final_text_counts_whether_written_or_submitted() -> None:
    task = _task("workspace", 0)
    assert task.solution[-1].name == "submit_final_answer"
    answer = task.solution[-1].arguments["answer"]
    for last in (
        Message(role="assistant", content=f"{answer} <done>"),
        _call("submit_final_answer", answer=answer),
    ):
        env = await _opened(task)
        assert not (await env.grade()).success
        assert (await env.step(last)).done
        assert (await env.grade()).reward == 1.0


async def test_a_tool_error_says_what_is_wrong() -> None:
    env = await _opened(_task("slack", 0))
    for action, wrong, words in [
        (_call("get_users_in_channel", channel="general"), False, "Alice"),
        (_call("get_users_in_channel"), True, "Error: ValidationError"),
        (_call("get_users_in_channel", channel="nowhere"), True, "Error: "),
        (_call("make_coffee"), True, "Error: Invalid tool make_coffee"),
        (_call("submit_final_answer", answer=3), True, "Error: submit_final_answer needs answer"),
        (_call("get_users_in_channel", channel="\ud800"), True, "Error: "),
        (_call("get_users_in_channel", channel="-" * 100_000 + "1"), True, "Error: "),
    ]:
        step = await env.step(action)
        (reply,) = step.messages
        assert (reply.is_error, step.done) == (wrong, False)
        assert words in reply.text


async def test_only_a_turn_without_a_call_ends_an_episode() -> None:
    env = await _opened(_task("slack", 0))
    call = ToolCall(id="call_0", name="get_channels", arguments={})
    beside = Message(role="assistant", content="Step one [done] <done>", tool_calls=(call,))
    assert not (await env.step(beside)).done
    step = await env.step(Message(role="assistant", malformed_calls=("<tool_call>{",)))
    assert not step.done
    assert "not valid JSON" in step.messages[0].text
    assert (await env.step(Message(role="assistant", content="Well."))).done
    with pytest.raises(EnvError, match="step after done"):
        await env.step(beside)


async def test_an_episode_writes_in_its_own_copy_of_the_world() -> None:
    task = _task("banking", 15)
    busy, idle = await _opened(task), await _opened(task)
    for call in task.solution:
        await busy.step(_call(call.name, **call.arguments))
    assert (await busy.grade()).success
    assert not (await idle.grade()).success
    again = await _opened(task)
    assert not (await again.grade()).success


async def test_a_check_that_breaks_leaves_the_grade_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = await _opened(_task("banking", 0))
    assert env._state is not None

    def broken(*_: object) -> bool:
        raise KeyError("gone")

    monkeypatch.setattr(env._state.user_task, "utility", broken)
    with pytest.raises(VerifierError, match="agentdojo-banking-user_task_0: utility: KeyError"):
        await env.grade()


async def test_an_unknown_suite_or_version_is_named() -> None:
    with pytest.raises(ConfigError, match="no suite 'bankng'; choose from workspace, travel"):
        agentdojo_tasks("bankng")
    with pytest.raises(ConfigError, match=r"no version 'v9'; write one such as v1\.2\.2"):
        agentdojo_tasks(version="v9")
    with pytest.raises(EnvError, match=r"task t: metadata={} names no suite"):
        await open_agentdojo(Task(key="t", env_key="e", prompt="p"))


def test_a_package_that_is_not_there_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "agentdojo", None)
    with pytest.raises(MissingExtraError, match=r"agentdojo is not installed.*\.\[agentdojo\]"):
        load_dojo.__wrapped__()


def test_neither_llm_clients_nor_their_stand_ins_are_left_in_the_interpreter() -> None:
    code = """
import sys
from skyfleet.envs.agentdojo.suites import load_dojo
from skyfleet.envs.agentdojo.tasks import agentdojo_tasks
assert "agentdojo" not in sys.modules
agentdojo_tasks("slack")
clients = {"anthropic", "cohere", "google.genai", "openai", "langchain"}
stand_ins = {"agentdojo.agent_pipeline", "agentdojo.agent_pipeline.llms.google_llm"}
print((clients | stand_ins) & sys.modules.keys())
"""
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ran.stdout.strip() == "set()"
