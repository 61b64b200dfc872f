"""OpenEnv servers that misbehave: one clear error each, and no leak."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect
from tests.fakes.counter_env import TASK, CounterEnv, make_factory
from tests.fakes.serving import nothing_left, serving
from tests.fakes.shouting_env import open_shouting

from skyfleet.chat.message import Message, ToolCall
from skyfleet.envs.env import Step
from skyfleet.envs.openenv.client import openenv_factory
from skyfleet.envs.openenv.server import ServedEnv, openenv_app
from skyfleet.envs.openenv.session import OpenEnvSettings
from skyfleet.errors import EnvError
from skyfleet.rollouts.episode import Limits, run_episode
from skyfleet.rollouts.scripted_agents import oracle_policy
from skyfleet.tasks.task import Task
from skyfleet.trajectories.trajectory import Ending
from skyfleet.worlds.catalog import generate_world_tasks, open_world

# After our server, which keeps gradio out.
from openenv.core.env_server import CallToolAction  # isort: skip

LIMITS = Limits(max_turns=12, max_input_length=10**6, trajectory_timeout_seconds=30)


def _settings(url: str, **others: Any) -> OpenEnvSettings:
    quick: dict[str, Any] = {"message_timeout_seconds": 5, "capacity_wait_seconds": 0.2}
    return OpenEnvSettings(base_url=url, **(quick | others))


async def _complaint(url: str, task: Task, **others: Any) -> str:
    """Why an episode fails."""
    open_env = openenv_factory(_settings(url, **others))
    trajectory = await run_episode(task, open_env, oracle_policy, LIMITS)
    assert (trajectory.grade, trajectory.ending) == (None, Ending.FAILED)
    assert trajectory.failure is not None
    assert trajectory.failure.kind == "EnvError"
    return trajectory.failure.detail


def _says(name: str, **arguments: Any) -> Message:
    call = ToolCall(id="c0", name=name, arguments=arguments)
    return Message(role="assistant", tool_calls=(call,))


async def test_fifty_megabytes_are_cut_and_a_frame_over_the_limit_ends_the_episode() -> None:
    app = openenv_app([TASK], open_shouting, max_sessions=2)
    async with nothing_left(), serving(app) as url:
        env = await openenv_factory(_settings(url))(TASK)
        await env.reset()
        (reply,) = (await env.step(_says("shout", length=50_000_000))).messages
        note = "\n(cut: the first 20,000 of 50,000,000 characters; ask for less)"
        assert reply.text == "a" * 20_000 + note
        await env.close()
        small = await openenv_factory(_settings(url, max_frame_bytes=10_000))(TASK)
        await small.reset()
        with pytest.raises(EnvError, match=r"step: the answer is over max_frame_bytes=10000$"):
            await small.step(_says("shout", length=20_000))
        with pytest.raises(EnvError, match="no session is open; call reset first"):
            await small.step(_says("shout", length=1))
        await small.close()


async def test_a_server_that_hangs_costs_one_episode_its_deadline() -> None:
    app = openenv_app([TASK], make_factory(CounterEnv(breaks="step", hangs=True)), max_sessions=1)
    call = TASK.model_validate(TASK.model_dump() | {"solution": [{"name": "press"}]})
    async with nothing_left(), serving(app) as url:
        complaint = await _complaint(url, call, message_timeout_seconds=0.2)
    assert complaint.endswith("step not answered in 0.2 s (message_timeout_seconds)")


async def test_a_server_that_vanishes_in_the_middle_costs_one_episode() -> None:
    task = generate_world_tasks("github", split="all", count=1)[0]
    async with nothing_left():
        async with serving(openenv_app([task], open_world, max_sessions=1)) as url:
            env = await openenv_factory(_settings(url))(task)
            await env.reset()
        with pytest.raises(EnvError, match="step: the socket closed, received 1012"):
            await env.step(_says("list_issues"))
        await env.close()
        gone = await _complaint(url, task)
    assert gone.endswith("tried for 0.2 s")
    assert "/ws: [Errno 111] Connect call failed" in gone


async def _bad_gateway(scope: Any, receive: Any, send: Any) -> None:
    kind = "websocket.http.response" if scope["type"] == "websocket" else "http.response"
    await receive()
    await send({"type": f"{kind}.start", "status": scope["app_status"], "headers": []})
    await send({"type": f"{kind}.body", "body": b"bad"})


@pytest.mark.parametrize(("status", "ending"), [(502, "502; tried for 0.2 s"), (401, "401")])
async def test_a_gateway_without_a_server_is_tried_again_and_a_refusal_is_not(
    status: int, ending: str
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await _bad_gateway(scope | {"app_status": status}, receive, send)

    async with nothing_left(), serving(app) as url:
        assert (await _complaint(url, TASK)).endswith(f"/ws: answers HTTP {ending}")


def _script(answer: Callable[[WebSocket, dict[str, Any]], Awaitable[None]]) -> Starlette:
    """A server that answers every frame with the given answer."""

    async def talk(socket: WebSocket) -> None:
        await socket.accept()
        try:
            while True:
                await answer(socket, await socket.receive_json())
        except (WebSocketDisconnect, RuntimeError):
            return

    async def schema(request: Request) -> Response:
        return JSONResponse({"action": {}})

    return Starlette(routes=[WebSocketRoute("/ws", talk), Route("/schema", schema)])


_EMPTY = {"type": "observation", "data": {"observation": {"tools": []}}}


async def test_a_socket_closed_before_the_first_reset_is_opened_again() -> None:
    frames: list[str] = []

    async def answer(socket: WebSocket, frame: dict[str, Any]) -> None:
        frames.append(frame["type"])
        if len(frames) < 3:
            await socket.close(1011)
        elif frame["type"] != "close":
            await socket.send_json(_EMPTY)

    async with nothing_left(), serving(_script(answer)) as url:
        env = await openenv_factory(_settings(url))(TASK)
        assert (await env.reset()).tools == ()
        await env.close()
    assert frames == ["reset", "reset", "reset", "step", "close"]


async def test_a_socket_closed_later_is_not() -> None:
    async def answer(socket: WebSocket, frame: dict[str, Any]) -> None:
        if frame["data"].get("type") == "call_tool":
            await socket.close(1011)
        await socket.send_json(_EMPTY)

    async with nothing_left(), serving(_script(answer)) as url:
        env = await openenv_factory(_settings(url))(TASK)
        await env.reset()
        with pytest.raises(EnvError, match="step: the socket closed, received 1011"):
            await env.step(_says("press"))
        await env.close()


@pytest.mark.parametrize("tools", [["press", "done"], ["press"]])
async def test_the_late_answer_of_a_step_that_was_cut_short_is_nobodys_grade(
    tools: list[str],
) -> None:
    async def answer(socket: WebSocket, frame: dict[str, Any]) -> None:
        if frame["data"].get("tool_name") == "press":
            await asyncio.sleep(0.5)
        observation = {"tools": [{"name": name} for name in tools]}
        reward = float(frame["data"].get("tool_name") == "done")
        data = {"observation": observation, "reward": reward}
        await socket.send_json({"type": "observation", "data": data})

    call = TASK.model_validate(TASK.model_dump() | {"solution": [{"name": "press"}]})
    limits = Limits(max_turns=2, max_input_length=10**6, trajectory_timeout_seconds=0.3)
    async with nothing_left(), serving(_script(answer)) as url:
        played = await run_episode(call, openenv_factory(_settings(url)), oracle_policy, limits)
    assert (played.grade, played.ending) == (None, Ending.TIMEOUT)
    assert played.failure is not None
    assert played.failure.kind == "VerifierError"
    assert "the session ended before the episode" in played.failure.detail


@pytest.mark.parametrize("code", ["VALIDATION_ERROR", "EXECUTION_ERROR"])
async def test_a_long_error_is_cut_like_any_other_result(code: str) -> None:
    async def answer(socket: WebSocket, frame: dict[str, Any]) -> None:
        refusal = {"type": "error", "data": {"code": code, "message": "a" * 50_000}}
        calls = frame["data"].get("type") == "call_tool"
        await socket.send_json(refusal if calls else _EMPTY)

    async with nothing_left(), serving(_script(answer)) as url:
        env = await openenv_factory(_settings(url))(TASK)
        await env.reset()
        if code == "VALIDATION_ERROR":
            (reply,) = (await env.step(_says("press"))).messages
            assert reply.is_error
            assert "a\n(cut: the first 20,000 of 50,0" in reply.text
            assert len(reply.text) < 20_100
        else:
            with pytest.raises(EnvError, match=r"a\n\(cut: the first 1,000 of 50,000"):
                await env.step(_says("press"))
        await env.close()


async def test_a_running_step_ends_before_its_env_is_closed() -> None:
    class Slow(CounterEnv):
        async def step(self, action: Message) -> Step:
            await asyncio.sleep(0.1)
            assert self.closed == 0
            return await super().step(action)

    env = Slow()
    served = ServedEnv({"t": TASK}, make_factory(env), 9)
    await served.reset_async(task_key="t")
    press = CallToolAction(tool_name="press", arguments={"by": 3})
    stepping = asyncio.create_task(served.step_async(press))
    await asyncio.sleep(0)
    await asyncio.to_thread(served.close)
    assert (await stepping).result == "3"
    assert env.closed == 1
    for again in (served.step_async(press), served.reset_async(task_key="t")):
        with pytest.raises(EnvError, match="was idle too long; connect again"):
            await again


async def test_an_invalid_frame_is_quoted_in_the_error() -> None:
    async def answer(socket: WebSocket, frame: dict[str, Any]) -> None:
        await socket.send_text("<html>" + "x" * 1000)

    async with nothing_left(), serving(_script(answer)) as url:
        complaint = await _complaint(url, TASK)
    assert complaint.endswith("x', which is no OpenEnv frame")
    assert len(complaint) < 200
