"""MCP: the official client on our server, and our adapter on other servers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from mcp import ClientSession, McpError
from mcp.client.streamable_http import streamable_http_client
from mcp.server.fastmcp import FastMCP
from mcp.server.fastmcp import Image as Picture
from tests.fakes.counter_env import TASK, CounterEnv, make_factory
from tests.fakes.serving import nothing_left, serving
from tests.fakes.shouting_env import open_shouting

from skyfleet.chat.message import Image, Message, Text, ToolCall
from skyfleet.envs.mcp.client import MCPSettings, mcp_factory
from skyfleet.envs.mcp.grading import FinishedEpisode, by_function, by_url, by_verifier
from skyfleet.envs.mcp.server import mcp_app
from skyfleet.errors import ConfigError, EnvError
from skyfleet.rollouts.episode import Limits, run_episode
from skyfleet.rollouts.scripted_agents import null_policy, oracle_policy
from skyfleet.tasks.task import Grade, Task
from skyfleet.trajectories.trajectory import Ending, Trajectory
from skyfleet.worlds.catalog import generate_world_tasks, open_world

LIMITS = Limits(max_turns=12, max_input_length=10**6, trajectory_timeout_seconds=30)
ROOT = Path(__file__).parents[2]


async def _unknown(played: FinishedEpisode) -> None: ...


def _served(url: str, **others: Any) -> MCPSettings:
    """What `mcp_app` serves at `url`."""
    grade = by_url(url + "/{task_key}/grade")
    return MCPSettings(url=url + "/{task_key}/mcp", grade=grade, **others)


def _world_command(data_key: str | None) -> tuple[str, ...]:
    seed = (data_key or "").removeprefix("seed-")
    return (sys.executable, "-m", "tests.fakes.mcp_world", "github", seed)


def _says(*calls: tuple[str, dict[str, Any]]) -> Message:
    made = [ToolCall(id=f"c{i}", name=n, arguments=a) for i, (n, a) in enumerate(calls)]
    return Message(role="assistant", tool_calls=tuple(made))


async def _play(settings: MCPSettings, task: Task, policy: Any = oracle_policy) -> Trajectory:
    return await run_episode(task, mcp_factory(settings), policy, LIMITS)


def _complaint(trajectory: Trajectory) -> str:
    assert (trajectory.grade, trajectory.ending) == (None, Ending.FAILED)
    assert trajectory.failure is not None
    assert trajectory.failure.kind == "EnvError"
    return trajectory.failure.detail


async def test_the_official_client_plays_our_worlds_to_a_reward_of_one() -> None:
    tasks = generate_world_tasks("github", split="all", count=3)
    async with (
        nothing_left(),
        serving(mcp_app(tasks, open_world)) as url,
        httpx.AsyncClient() as http,
    ):
        for task in tasks:
            async with (
                streamable_http_client(f"{url}/{task.key}/mcp") as (read, write, session_id),
                ClientSession(read, write) as session,
            ):
                result = await session.initialize()
                assert (result.instructions or "").endswith(task.prompt)
                await session.send_ping()
                assert (await session.list_tools()).tools[0].name == "list_issues"
                for call in task.solution:
                    await session.call_tool(call.name, call.arguments)
                headers = {"mcp-session-id": session_id() or ""}
                graded = await http.get(f"{url}/{task.key}/grade", headers=headers)
                assert (graded.json()["reward"], graded.json()["success"]) == (1.0, True)
            closed = await http.get(f"{url}/{task.key}/grade", headers=headers)
            assert closed.status_code == 404


async def test_an_episode_through_the_adapter_equals_the_episode_without_it() -> None:
    tasks = generate_world_tasks("github", split="all", count=16)
    async with nothing_left(), serving(mcp_app(tasks, open_world)) as url:
        outside = await asyncio.gather(*(_play(_served(url), task) for task in tasks))
        idle = await _play(_served(url), tasks[0], null_policy)
    inside = [await run_episode(task, open_world, oracle_policy, LIMITS) for task in tasks]
    assert [t.reward for t in outside] == [1.0] * 16
    assert [t.prompt for t in outside] == [t.prompt for t in inside]
    assert [[turn.replies for turn in t.turns] for t in outside] == [
        [turn.replies for turn in t.turns] for t in inside
    ]
    assert (idle.reward, idle.ending) == (0.0, Ending.DONE)


async def test_a_server_on_stdio_is_graded_by_the_state_it_offers() -> None:
    tasks = generate_world_tasks("github", split="all", count=12)
    task = next(t for t in tasks if t.metadata["template"] == "close_by_title")
    settings = MCPSettings(
        command=_world_command(task.data_key),
        environment={"PYTHONPATH": f"{ROOT}:{ROOT}/src"},
        grade=by_verifier(seed_uri="state://seed", current_uri="state://current"),
    )
    async with nothing_left():
        env = await mcp_factory(settings)(task)
        opened = await env.reset()
        assert opened.messages[0].text.endswith("\nBe brief.")
        assert opened.messages[1].text == task.prompt
        before = await env.grade()
        assert before is not None
        await env.step(_says(*[(call.name, call.arguments) for call in task.solution]))
        after = await env.grade()
        assert after is not None
        assert (before.reward, after.reward) == (0.0, 1.0)
        with pytest.raises(EnvError, match=r"(?s)tools/call get_issue: .*the world ends here"):
            await env.step(_says(("get_issue", {"number": 404})))
        await env.close()


async def test_a_command_that_is_not_there_is_named() -> None:
    settings = MCPSettings(command=("no-such-server", "{task_key}"), grade=_unknown)
    async with nothing_left():
        complaint = _complaint(await _play(settings, TASK))
    assert complaint.startswith("no-such-server t: initialize: FileNotFoundError:")


def reward_three(task: Task, messages: Sequence[Message]) -> float | None:
    assert task.key == "t"
    return float(any("3" in message.text for message in messages if message.role == "tool"))


def _somebodys() -> FastMCP:
    server = FastMCP("somebodys")

    @server.tool()
    def add(a: int, b: int) -> int:
        return a + b

    @server.tool()
    def fail() -> str:
        raise ValueError("not today")

    @server.tool(structured_output=False)
    def look() -> list[Any]:
        return ["a picture", Picture(data=b"\x89PNG", format="png")]

    @server.tool()
    async def sleep() -> str:
        await asyncio.sleep(30)
        return "awake"

    return server


async def test_the_official_server_is_an_env_with_a_reward_function() -> None:
    grade = by_function("tests.envs.test_mcp_adapter:reward_three")
    async with serving(_somebodys().streamable_http_app()) as url:
        settings = MCPSettings(url=f"{url}/mcp", grade=grade, call_timeout_seconds=1)
        env = await mcp_factory(settings)(TASK)
        opened = await env.reset()
        assert [tool.name for tool in opened.tools] == ["add", "fail", "look", "sleep"]
        assert opened.tools[0].parameters["required"] == ["a", "b"]
        calls = _says(("add", {"a": 1, "b": 2}), ("fail", {}), ("nope", {}), ("look", {}))
        three, failed, unknown, seen = (await env.step(calls)).messages
        assert (three.text, three.is_error, three.tool_call_id) == ("3", False, "c0")
        assert (failed.is_error, unknown.is_error) == (True, True)
        assert "not today" in failed.text
        assert "nope" in unknown.text
        assert seen.content == (Text("a picture"), Image(b"\x89PNG", "image/png"))
        assert await env.grade() == Grade(reward=1.0, success=True)
        with pytest.raises(EnvError, match=r"sleep not answered in 1 s \(call_timeout_seconds\)$"):
            await env.step(_says(("sleep", {})))
        await env.close()


async def test_a_result_of_fifty_megabytes_is_cut() -> None:
    async with nothing_left(), serving(mcp_app([TASK], open_shouting)) as url:
        env = await mcp_factory(_served(url, max_result_characters=10))(TASK)
        await env.reset()
        (reply,) = (await env.step(_says(("shout", {"length": 50_000_000})))).messages
        await env.close()
    assert reply.text == "aaaaaaaaaa\n(cut: the first 10 of 50,000,000 characters; ask for less)"


async def test_a_server_that_vanishes_in_the_middle_costs_one_episode() -> None:
    task = generate_world_tasks("github", split="all", count=1)[0]
    async with nothing_left():
        async with serving(mcp_app([task], open_world)) as url:
            env = await mcp_factory(_served(url))(task)
            await env.reset()
        with pytest.raises(EnvError, match="tools/call list_issues: ConnectError: All connection"):
            await env.step(_says(("list_issues", {})))
        await env.close()
        assert "initialize: ConnectError" in _complaint(await _play(_served(url), task))


async def test_a_gateway_without_a_server_costs_one_episode() -> None:
    task = generate_world_tasks("github", split="all", count=1)[0]
    inner, broken = mcp_app([task], open_world), False

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not broken:
            await inner(scope, receive, send)
        else:
            await send({"type": "http.response.start", "status": 502, "headers": []})
            await send({"type": "http.response.body", "body": b"bad"})

    async with nothing_left(), serving(app) as url:
        env = await mcp_factory(_served(url))(task)
        await env.reset()
        broken = True
        with pytest.raises(EnvError, match=r"tools/call list_issues: HTTPStatusError: .*502"):
            await env.step(_says(("list_issues", {})))
        await env.close()
        assert "HTTPStatusError" in _complaint(await _play(_served(url), task))


async def test_a_server_that_never_answers_costs_one_episode_its_deadline() -> None:
    open_env = make_factory(CounterEnv(breaks="reset", hangs=True))
    async with nothing_left(), serving(mcp_app([TASK], open_env)) as url:
        complaint = _complaint(await _play(_served(url, call_timeout_seconds=0.2), TASK))
    assert complaint.endswith("initialize not answered in 0.2 s (call_timeout_seconds)")


async def test_an_unknown_task_is_one_sentence() -> None:
    task = generate_world_tasks("github", split="all", count=1)[0]
    near = task.model_copy(update={"key": f"{task.key}x"})
    async with nothing_left(), serving(mcp_app([task], open_world)) as url:
        complaint = _complaint(await _play(_served(url), near))
        async with (
            streamable_http_client(f"{url}/nothing/mcp") as (read, write, _),
            ClientSession(read, write) as session,
        ):
            with pytest.raises(McpError, match="task 'nothing' is unknown; there are 1"):
                await session.initialize()
    assert complaint.endswith(f"did you mean '{task.key}'?")


async def test_a_grade_that_cannot_be_had_stays_unknown_with_its_cause() -> None:
    open_env = make_factory(CounterEnv(breaks="grade"))
    async with nothing_left(), serving(mcp_app([TASK], open_env)) as url:
        trajectory = await _play(_served(url), TASK, null_policy)
    assert (trajectory.grade, trajectory.ending) == (None, Ending.DONE)
    assert trajectory.failure is not None
    assert trajectory.failure.detail.endswith("/t/grade: grade: OSError: it broke")


def test_settings_that_contradict_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"url=None, command=\(\); give one of them"):
        MCPSettings(grade=_unknown)
    with pytest.raises(ConfigError, match=r"url='http://a', command=\('b',\); give one of them"):
        MCPSettings(grade=_unknown, url="http://a", command=("b",))
    with pytest.raises(
        ConfigError, match=r"environment\.mcp\.reward='nowhere:f' cannot be imported"
    ):
        by_function("nowhere:f")
