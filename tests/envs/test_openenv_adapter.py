"""OpenEnv: the official client on our server, and our adapter on other servers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import AsyncExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.fakes.counter_env import TASK, CounterEnv, make_factory
from tests.fakes.serving import nothing_left, serving

from skyfleet.chat.message import Message, ToolCall
from skyfleet.envs.env import Observation as EnvObservation
from skyfleet.envs.openenv.client import openenv_factory
from skyfleet.envs.openenv.server import _unimportable, openenv_app
from skyfleet.envs.openenv.session import OpenEnvSettings
from skyfleet.errors import ConfigError
from skyfleet.rollouts.episode import Limits, run_episode
from skyfleet.rollouts.scripted_agents import null_policy, oracle_policy
from skyfleet.tasks.task import Task
from skyfleet.trajectories.trajectory import Ending, Trajectory
from skyfleet.worlds.catalog import generate_world_tasks, open_world

# After our server, which keeps gradio out.
from openenv.core import GenericEnvClient  # isort: skip
from openenv.core.env_server import Action, Environment, Observation, State, create_app  # isort: skip

LIMITS = Limits(max_turns=12, max_input_length=10**6, trajectory_timeout_seconds=30)


def _settings(url: str, **others: Any) -> OpenEnvSettings:
    quick: dict[str, Any] = {"message_timeout_seconds": 5, "capacity_wait_seconds": 0.2}
    return OpenEnvSettings(base_url=url, **(quick | others))


async def _play(url: str, task: Task, policy: Any = oracle_policy, **others: Any) -> Trajectory:
    return await run_episode(task, openenv_factory(_settings(url, **others)), policy, LIMITS)


def _says(*calls: tuple[str, dict[str, Any]], text: str = "") -> Message:
    made = [ToolCall(id=f"c{i}", name=n, arguments=a) for i, (n, a) in enumerate(calls)]
    return Message(role="assistant", content=text, tool_calls=tuple(made))


def _complaint(trajectory: Trajectory) -> str:
    assert trajectory.grade is None
    assert trajectory.ending is Ending.FAILED
    assert trajectory.failure is not None
    assert trajectory.failure.kind == "EnvError"
    return trajectory.failure.detail


async def test_the_official_client_plays_our_worlds_to_a_reward_of_one() -> None:
    tasks = generate_world_tasks("github", split="all", count=8)
    app = openenv_app(tasks, open_world, max_sessions=1)
    async with nothing_left(), serving(app) as url, GenericEnvClient(base_url=url) as client:
        for task in tasks:
            seen = await client.reset(task_key=task.key)
            assert seen.observation["metadata"]["prompt"].endswith(task.prompt)
            listed = await client.step({"type": "list_tools"})
            names = [tool["name"] for tool in listed.observation["tools"]]
            assert (names[0], names[-1]) == ("list_issues", "done")
            for call in task.solution:
                action = {"tool_name": call.name, "arguments": call.arguments}
                seen = await client.step({"type": "call_tool", **action})
            if not seen.done:
                assert seen.reward is None
                seen = await client.step({"type": "call_tool", "tool_name": "done"})
            assert (seen.reward, seen.done) == (1.0, True)


async def test_an_episode_through_the_adapter_equals_the_episode_without_it() -> None:
    tasks = generate_world_tasks("github", split="all", count=16)
    async with nothing_left(), serving(openenv_app(tasks, open_world, max_sessions=16)) as url:
        outside = await asyncio.gather(*(_play(url, task) for task in tasks))
        idle = await _play(url, tasks[0], null_policy)
        tools = (await _reset(url, tasks[0])).tools
    inside = [await run_episode(task, open_world, oracle_policy, LIMITS) for task in tasks]
    assert [t.reward for t in outside] == [1.0] * 16
    assert [t.prompt for t in outside] == [t.prompt for t in inside]
    assert [[turn.replies for turn in t.turns] for t in outside] == [
        [turn.replies for turn in t.turns] for t in inside
    ]
    assert (idle.reward, idle.ending) == (0.0, Ending.DONE)
    assert tools == (await (await open_world(tasks[0])).reset()).tools


async def _reset(url: str, task: Task) -> EnvObservation:
    env = await openenv_factory(_settings(url))(task)
    try:
        return await env.reset()
    finally:
        await env.close()


async def test_a_full_server_is_waited_for() -> None:
    tasks = generate_world_tasks("github", split="all", count=16)
    async with nothing_left(), serving(openenv_app(tasks, open_world, max_sessions=2)) as url:
        played = await asyncio.gather(
            *(_play(url, task, capacity_wait_seconds=20) for task in tasks)
        )
        assert [t.reward for t in played] == [1.0] * 16
        async with AsyncExitStack() as held:
            for task in tasks[:2]:
                client = await held.enter_async_context(GenericEnvClient(base_url=url))
                await client.reset(task_key=task.key)
            complaint = _complaint(await _play(url, tasks[2]))
    assert "Server at capacity: 2/2 sessions active" in complaint
    assert complaint.endswith("tried for 0.2 s")


async def test_an_unknown_task_is_one_sentence() -> None:
    tasks = generate_world_tasks("github", split="all", count=1)
    near = f"{tasks[0].key}x"
    async with nothing_left(), serving(openenv_app(tasks, open_world, max_sessions=1)) as url:
        async with GenericEnvClient(base_url=url) as client:
            with pytest.raises(RuntimeError, match=f"did you mean '{tasks[0].key}'"):
                await client.reset(task_key=near)
            with pytest.raises(RuntimeError, match="task_key=None is unknown; 1 tasks, such as"):
                await client.reset()
            with pytest.raises(RuntimeError, match="call reset with a task_key first"):
                await client.step({"type": "list_tools"})
        complaint = _complaint(await _play(url, tasks[0].model_copy(update={"key": near})))
    assert f"EXECUTION_ERROR: task_key='{near}' is unknown" in complaint


async def test_the_steps_of_an_episode_are_limited_and_the_last_one_is_graded() -> None:
    task = generate_world_tasks("github", split="all", count=1)[0]
    app = openenv_app([task], open_world, max_sessions=1, max_steps=2)
    action = {"type": "call_tool", "tool_name": "list_issues", "arguments": {"repo": "?"}}
    async with serving(app) as url, GenericEnvClient(base_url=url) as client:
        await client.reset(task_key=task.key)
        first, second = await client.step(action), await client.step(action)
        assert first.observation["error"]["error_type"] == "execution_error"
        assert (first.done, second.done, second.reward) == (False, True, 0.0)
        with pytest.raises(RuntimeError, match="the episode is over; call reset for another"):
            await client.step(action)


async def test_a_grade_that_cannot_be_had_stays_unknown_with_its_cause() -> None:
    app = openenv_app([TASK], make_factory(CounterEnv(breaks="grade")), max_sessions=1)
    async with nothing_left(), serving(app) as url:
        trajectory = await _play(url, TASK, null_policy)
    assert (trajectory.grade, trajectory.ending) == (None, Ending.DONE)
    assert trajectory.failure is not None
    assert trajectory.failure.detail == "grade: OSError: it broke"


async def test_the_env_is_closed_with_its_socket_and_with_a_request_that_has_none() -> None:
    env = CounterEnv()
    app = openenv_app([TASK], make_factory(env), max_sessions=1)
    async with nothing_left(), serving(app) as url:
        await _play(url, TASK, null_policy)
        async with httpx.AsyncClient() as http:
            answer = await http.post(f"{url}/reset", json={"task_key": "t"})
        assert answer.json()["observation"]["metadata"]["prompt"] == "reach 3"
    assert env.closed == 2


class Guess(Action):  # type: ignore[misc]
    """Guess the number."""

    number: int


class GuessingGame(Environment):  # type: ignore[misc]
    """Somebody's env with actions of its own, written as OpenEnv's guide has it."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, seed: int = 0, episode_id: str | None = None, low: int = 0) -> Observation:
        self.secret = low + 3
        return Observation(metadata={"prompt": f"from {low}"})

    def step(self, action: Guess, timeout_s: float | None = None) -> Observation:
        right = action.number == self.secret
        return Observation(done=right, reward=1.0 if right else 0.25, metadata={"hint": "more"})


async def test_a_server_with_actions_of_its_own_has_one_tool() -> None:
    app = create_app(GuessingGame, Guess, Observation, max_concurrent_envs=2)
    task = TASK.model_copy(update={"metadata": {"reset": {"low": 5}}})
    async with nothing_left(), serving(app) as url:
        env = await openenv_factory(_settings(url))(task)
        opened = await env.reset()
        assert opened.messages[1].text == "from 5"
        (tool,) = opened.tools
        assert (tool.name, tool.description) == ("step", "Guess the number.")
        assert list(tool.parameters["properties"]) == ["number"]
        refused = await env.step(_says(("step", {"number": "many"})))
        assert refused.messages[0].is_error
        assert "number: Input should be a valid integer" in refused.messages[0].text
        wrong = await env.step(_says(("step", {"number": 7})))
        assert (wrong.reward, wrong.done) == (0.25, False)
        grade = await env.grade()
        assert grade is not None
        assert (grade.reward, grade.success) == (0.25, False)
        right = await env.step(_says(("step", {"number": 8})))
        assert (right.reward, right.done) == (1.0, True)
        grade = await env.grade()
        assert grade is not None
        assert grade.success
        await env.close()


async def test_a_server_built_on_fastmcp_works_too() -> None:
    from fastmcp import FastMCP
    from openenv.core.env_server import CallToolAction, CallToolObservation, MCPEnvironment

    tools = FastMCP("adding")

    @tools.tool
    def add(a: int, b: int) -> int:
        return a + b

    class Adding(MCPEnvironment):  # type: ignore[misc]
        SUPPORTS_CONCURRENT_SESSIONS = True
        state = State()

        def reset(self, seed: int | None = None, episode_id: str | None = None) -> Observation:
            return Observation()

        def _step_impl(self, action: Action, timeout_s: float | None = None) -> Observation:
            raise NotImplementedError

    app = create_app(partial(Adding, tools), CallToolAction, CallToolObservation)
    async with serving(app) as url:
        env = await openenv_factory(_settings(url))(TASK)
        opened = await env.reset()
        assert opened.messages[1].text == "reach 3", "the task's own prompt where none is given"
        assert [tool.name for tool in opened.tools] == ["add"]
        step = await env.step(_says(("add", {"a": 2, "b": 3}), ("add", {"a": "x", "b": 3})))
        assert step.messages[0].text == "5"
        assert [reply.is_error for reply in step.messages] == [False, True]
        assert await env.grade() is None
        await env.close()


def test_an_address_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"base_url='localhost:1'; write http://host:port"):
        OpenEnvSettings(base_url="localhost:1")


def test_a_blocked_import_works_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "costly_page.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with _unimportable("costly_page"), pytest.raises(ModuleNotFoundError):
        import_module("costly_page")
    page = import_module("costly_page")
    with _unimportable("costly_page"):
        assert import_module("costly_page") is page, "what was there before stays"
    assert "gradio" not in sys.modules


def test_the_client_needs_no_openenv() -> None:
    code = (
        "import sys, skyfleet.envs.openenv.client; "
        "sys.exit(any(name in sys.modules for name in ('openenv', 'gradio', 'fastapi', 'torch')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
