"""The answers of our MCP server to valid and invalid clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from tests.fakes.counter_env import TASK, CounterEnv, make_factory
from tests.fakes.serving import nothing_left, serving

from skyfleet.envs.env import EnvFactory
from skyfleet.envs.mcp.server import SESSION_HEADER, mcp_app
from skyfleet.tasks.task import Task
from skyfleet.worlds.catalog import generate_world_tasks, open_world

OTHER = TASK.model_copy(update={"key": "other"})


@asynccontextmanager
async def _served(
    open_env: EnvFactory, tasks: tuple[Task, ...] = (TASK, OTHER), **limits: Any
) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        nothing_left(),
        serving(mcp_app(tasks, open_env, **limits)) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        yield http


async def _ask(
    http: httpx.AsyncClient, method: str, session: str = "", key: str = "t", **params: Any
) -> httpx.Response:
    message = {"jsonrpc": "2.0", "id": 7, "method": method, "params": params}
    return await http.post(f"/{key}/mcp", json=message, headers={SESSION_HEADER: session})


async def _open(http: httpx.AsyncClient) -> str:
    return (await _ask(http, "initialize")).headers[SESSION_HEADER]


async def test_a_body_that_is_no_message_is_rejected() -> None:
    async with _served(make_factory(CounterEnv())) as http:
        for body in (b"", b"{", b"[]", b'{"id": {}}', b"[" * 100_000):
            answer = await http.post("/t/mcp", content=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == -32600
        note = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        assert (await http.post("/t/mcp", json=note)).status_code == 202
        assert (await http.get("/t/mcp")).status_code == 405
        page = await http.post("/t/mcp", json=note, headers={"origin": "http://evil.example"})
        assert page.status_code == 403


async def test_an_invalid_call_gets_an_error_answer() -> None:
    async with _served(make_factory(CounterEnv())) as http:
        session = await _open(http)
        unknown = await _ask(http, "prompts/list", session)
        assert unknown.json()["error"] == {
            "code": -32601,
            "message": "method 'prompts/list' is unknown here",
        }
        for wrong in ({}, {"name": 3}, {"name": "press", "arguments": [1]}):
            answer = await _ask(http, "tools/call", session, **wrong)
            assert answer.json()["error"]["code"] == -32602
        assert (await _ask(http, "ping", session)).json()["result"] == {}


@pytest.mark.parametrize(("asked", "given"), [("2025-03-26", "2025-03-26"), ("1", "2025-11-25")])
async def test_the_version_is_the_clients_where_we_know_it(asked: str, given: str) -> None:
    async with _served(make_factory(CounterEnv())) as http:
        answer = await _ask(http, "initialize", protocolVersion=asked)
        assert answer.json()["result"]["protocolVersion"] == given


async def test_a_session_belongs_to_its_task_and_ends_with_delete() -> None:
    env = CounterEnv()
    async with _served(make_factory(env)) as http:
        session = await _open(http)
        elsewhere = await _ask(http, "ping", session, key="other")
        assert elsewhere.status_code == 404
        assert "initialize again" in elsewhere.json()["error"]["message"]
        headers = {SESSION_HEADER: session}
        assert (await http.delete("/t/mcp", headers=headers)).status_code == 204
        assert env.closed == 1
        assert (await http.delete("/t/mcp", headers=headers)).status_code == 404
        assert (await _ask(http, "ping", session)).status_code == 404


async def test_an_episode_is_graded_once_and_over_then() -> None:
    tasks = generate_world_tasks("github", split="all", count=1)
    async with _served(open_world, tuple(tasks)) as http:
        key = tasks[0].key
        answer = await _ask(http, "initialize", key=key)
        session = answer.headers[SESSION_HEADER]
        result = [
            (await http.get(f"/{key}/grade", headers={SESSION_HEADER: session})).json()
            for _ in range(2)
        ]
        assert result[0] == result[1]
        assert (result[0]["reward"], result[0]["success"]) == (0.0, False)
        late = await _ask(http, "tools/call", session, key, name="list_issues")
        assert late.json()["result"]["isError"]
        assert "the episode is over" in late.json()["result"]["content"][0]["text"]


async def test_an_env_that_breaks_is_one_error_and_one_that_will_not_open_no_session() -> None:
    async with _served(make_factory(CounterEnv(breaks="step"))) as http:
        answer = await _ask(http, "tools/call", await _open(http), name="press")
        error = {"code": -32603, "message": "step: OSError: it broke"}
        assert answer.json()["error"] == error
    env = CounterEnv(breaks="reset")
    async with _served(make_factory(env), max_sessions=1) as http:
        for _ in range(2):
            answer = await _ask(http, "initialize")
            assert answer.json()["error"]["message"] == "reset: OSError: it broke"
            assert SESSION_HEADER not in answer.headers
    assert env.closed == 2


async def test_sessions_are_limited_and_idle_ones_are_closed() -> None:
    env = CounterEnv()
    async with _served(make_factory(env), max_sessions=1, idle_timeout_seconds=0.2) as http:
        await _open(http)
        full = (await _ask(http, "initialize")).json()["error"]["message"]
        assert full == "all 1 sessions are open; close one or retry later"
        await asyncio.sleep(0.4)
        assert env.closed == 1
        await _open(http)
    assert env.closed == 2, "what is open when the server ends is closed"
