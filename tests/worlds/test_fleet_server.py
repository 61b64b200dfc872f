"""The Fleet-compatible server, called by an unmodified fleet-python and the official MCP client."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib import import_module
from typing import Any

import httpx
import pytest
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client
from tests.fakes.serving import serving

from skyfleet.errors import ConfigError
from skyfleet.tasks.task import Task
from skyfleet.worlds.catalog import generate_world_tasks, get_world
from skyfleet.worlds.fleet_server.server import build_fleet_app

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # It uses pydantic's version 1 API.
    fleet: Any = import_module("fleet")

# fleet-python calls datetime.utcnow, which Python 3.12 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

KEY = "local-key"
TASKS = generate_world_tasks("github", split="all", count=12)
WRITING = next(task for task in TASKS if task.metadata["template"] == "close_by_title")
HEADERS = {"Authorization": f"Bearer {KEY}"}


@asynccontextmanager
async def _serve(**options: Any) -> AsyncIterator[tuple[str, Any]]:
    """Yields the base URL and the server's instance pool."""
    app = build_fleet_app(TASKS, api_key=KEY, **options)
    async with serving(app) as base_url:
        yield base_url, app.state.instances


@asynccontextmanager
async def _client(base_url: str, api_key: str = KEY) -> AsyncIterator[Any]:
    client = fleet.AsyncFleet(api_key=api_key, base_url=base_url)
    try:
        yield client
    finally:
        await client._httpx_client.aclose()  # The client has no close of its own.


@contextmanager
def _sync_client(base_url: str | None = None, api_key: str | None = None) -> Iterator[Any]:
    client = fleet.Fleet(api_key=api_key, base_url=base_url)
    try:
        yield client
    finally:
        client._httpx_client.close()


def _create(client: Any, task: Task = WRITING, **options: Any) -> Any:
    return client.make(
        task.env_key, data_key=task.data_key, env_variables=task.env_variables, **options
    )


@asynccontextmanager
async def _tools(url: str) -> AsyncIterator[ClientSession]:
    async with (
        httpx.AsyncClient(headers=HEADERS) as http,
        streamable_http_client(url, http_client=http) as (read, write, _),
        ClientSession(read, write) as session,
    ):
        await session.initialize()
        yield session


async def _play(url: str, task: Task) -> None:
    async with _tools(url) as session:
        for call in task.solution:
            result = await session.call_tool(call.name, call.arguments)
            assert not result.isError


@pytest.mark.parametrize("endpoint", ["mcp", "api/v1/mcp"])
async def test_an_unmodified_async_client_earns_one_for_the_solution_and_zero_for_nothing(
    endpoint: str,
) -> None:
    async with _serve() as (base_url, instances), _client(base_url) as client:
        (task,) = await client.load_tasks(keys=[WRITING.key])
        assert task.prompt == WRITING.prompt
        env = await _create(client)
        assert (await env.reset()).success
        assert await task.verify_async(env) == 0.0
        async with _tools(f"{env.urls.root}{endpoint}") as session:
            listed = {tool.name: tool for tool in (await session.list_tools()).tools}
            wrong = await session.call_tool("get_issue", {"number": 10**6})
        assert wrong.isError
        toolkit = get_world("github").toolkit
        assert listed.keys() == {spec.name for spec in toolkit.specs}
        hints = {name for name, tool in listed.items() if tool.annotations.readOnlyHint}  # type: ignore[union-attr]
        assert hints == listed.keys() - toolkit.writing
        await _play(f"{env.urls.root}{endpoint}", WRITING)
        assert await task.verify_async(env) == 1.0
        assert (await env.close()).status == "stopped"
        assert (instances.created, instances.deleted) == (1, 1)


async def test_an_unmodified_sync_client_can_use_all_other_routes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run() -> None:
        with _sync_client() as client:
            use(client)

    def use(client: Any) -> None:
        (task,) = client.load_tasks(env_key="github", keys=[WRITING.key])
        env = _create(client, run_id="run-7", ttl_seconds=60, heartbeat_interval=30)
        assert task.data_key == WRITING.data_key
        assert env.env_variables == WRITING.env_variables
        assert env.data_key == WRITING.data_key
        assert [one.instance_id for one in client.instances(run_id="run-7")] == [env.instance_id]
        assert client.instances(run_id="run-8") == []
        assert client.instance(env.instance_id).status == "running"
        assert env.heartbeat().interval_seconds == 30
        assert client.account().instance_count == 1
        assert client.environment("github").env_key == "github"
        assert "outlook" in [world.env_key for world in client.list_envs()]
        assert client.list_regions() == ["local"]
        assert env.instance.manager_health_check().status == "healthy"
        assert client.get_task(WRITING.key).prompt == WRITING.prompt
        assert env.verify_raw(WRITING.verifier_code).result == 0.0, "the older request format"
        assert [one.instance_id for one in client.close_all(run_id="run-7")] == [env.instance_id]

    async with _serve() as (base_url, instances):
        monkeypatch.setenv("FLEET_BASE_URL", base_url)
        monkeypatch.setenv("FLEET_API_KEY", KEY)
        await asyncio.to_thread(run)
        assert (instances.created, instances.deleted) == (1, 1)


async def test_databases_are_described_queried_and_compared() -> None:
    def run(base_url: str) -> None:
        with _sync_client(base_url, KEY) as client:
            use(_create(client))

    def use(env: Any) -> None:
        env.instance.load()
        current, seed = env.db("current"), env.db("seed")
        (issues,) = [table for table in current.describe().tables if table.name == "issues"]
        assert [c["name"] for c in issues.columns if c["primary_key"]] == ["number"]
        first = "select title from issues where number = ?"
        title = seed.query(first, [1]).rows[0][0]
        changed = current.exec("update issues set title = 'new' where number = ?", [1])
        assert changed.rows_affected == 1
        assert current.query(first, [1]).rows == [["new"]]
        assert seed.query(first, [1]).rows == [[title]]
        refused = seed.exec("delete from issues")
        assert not refused.success
        assert "readonly" in refused.error
        diff = seed.snapshot().diff(current.snapshot(), use_structured_diff=True)
        spec = {"table": "issues", "pk": 1, "type": "modify", "no_other_changes": True}
        diff.expect_exactly([{**spec, "resulting_fields": [("title", "new")]}])
        with pytest.raises(AssertionError):
            diff.expect_exactly([{**spec, "resulting_fields": [("title", "old")]}])
        assert env.reset().success
        assert current.query(first, [1]).rows == [[title]]
        env.close()

    async with _serve() as (base_url, _):
        await asyncio.to_thread(run, base_url)


async def test_a_request_without_the_key_is_rejected() -> None:
    routes = ["/v1/tasks", "/v1/env/instances", "/v1/runner-auth/token", "/instances/x/mcp", "/no"]
    async with _serve() as (base_url, instances), httpx.AsyncClient() as http:
        for headers in ({}, {"Authorization": "Bearer other"}, {"X-Runner-Token": ""}):
            for route in routes:
                response = await http.get(base_url + route, headers=headers)
                assert response.status_code == 401, route
        token = (await http.get(f"{base_url}/v1/runner-auth/token", headers=HEADERS)).json()
        by_token = {"X-Runner-Token": token["token"]}
        assert (await http.get(f"{base_url}/v1/tasks", headers=by_token)).status_code == 401
        async with _client(base_url, "other") as client:
            with pytest.raises(Exception, match="send Bearer") as raised:
                await _create(client)
        assert type(raised.value).__name__ == "FleetAuthenticationError"
        assert instances.created == 0
    with pytest.raises(ConfigError, match="api_key"):
        build_fleet_app(TASKS, api_key="")


async def test_unknown_names_and_routes_are_rejected_with_a_status_that_clients_do_not_retry() -> (
    None
):
    requests = [
        ("GET", "/v1/jobs", 400),
        ("GET", "/v1/tasks/none", 400),
        ("GET", "/v1/env/instances/none", 410),
        ("DELETE", "/v1/env/instances/none", 410),
        ("POST", "/instances/none/mcp", 410),
        ("GET", "/instances/none/mcp", 405),
    ]
    async with _serve() as (base_url, _), httpx.AsyncClient(headers=HEADERS) as http:
        for method, path, status in requests:
            response = await http.request(method, base_url + path)
            assert response.status_code == status, path
        bodies: list[tuple[dict[str, Any], str]] = [
            ({"env_key": "gitub"}, "environment 'gitub' not found"),
            ({"env_key": "github", "data_key": "default"}, "data_key='default'; write seed-"),
            ({"env_key": "github", "image_type": "mcp"}, "no screen"),
            (
                {"env_key": "github", "env_variables": {"CURRENT_DATE": "today"}},
                "Invalid isoformat",
            ),
            ({"env_key": "github", "ttl_seconds": 0}, "ttl_seconds=0; "),
            ({}, "env_key="),
        ]
        for body, message in bodies:
            response = await http.post(f"{base_url}/v1/env/instances", json=body)
            assert response.status_code == 400
            assert message in response.json()["detail"]


async def test_data_key_selects_the_data_and_env_variables_the_date() -> None:
    async with _serve() as (base_url, instances), httpx.AsyncClient(headers=HEADERS) as http:
        for data_key in ("seed-3", "seed-4", None):
            await _manager(http, base_url, data_key=data_key)
        await _manager(http, base_url, env_variables={"CURRENT_DATE": "2026-02-03"})
        three, four, usual, dated = instances
        images = {one.data_seed: one.app.db.image() for one in instances}
        assert images == {seed: get_world("github").image(seed) for seed in (3, 4, 0)}
        assert (three.data_seed, four.data_seed, usual.data_seed) == (3, 4, 0)
        assert dated.app.current_date == "2026-02-03"


async def test_instances_expire_after_their_ttl_or_a_missed_heartbeat() -> None:
    async with _serve(ttl_seconds=1) as (base_url, instances), _client(base_url) as client:
        await _create(client)
        long = await _create(client, ttl_seconds=60)
        await _create(client, ttl_seconds=60, heartbeat_interval=1)
        alive = await _create(client, ttl_seconds=60, heartbeat_interval=2)
        for _ in range(5):
            await asyncio.sleep(0.5)
            await alive.heartbeat()
        assert instances.deleted == 2, "closed without a request"
        assert {one.id for one in instances} == {long.instance_id, alive.instance_id}
    assert instances.created == instances.deleted == 4, "stopping the server closes the rest"


async def test_the_instance_limit_raises_the_clients_own_error() -> None:
    async with _serve(max_instances=1) as (base_url, instances), _client(base_url) as client:
        first = await _create(client)
        with pytest.raises(Exception, match="1 of 1 are open") as raised:
            await _create(client)
        assert type(raised.value).__name__ == "FleetInstanceLimitError"
        await first.close()
        await (await _create(client)).close()
        assert instances.created == 2


async def test_a_repeated_create_request_returns_the_same_instance() -> None:
    async with _serve() as (base_url, instances), httpx.AsyncClient(headers=HEADERS) as http:
        request = {"json": {"env_key": "github"}, "headers": {"X-Request-ID": "r1"}}
        first = (await http.post(f"{base_url}/v1/env/instances", **request)).json()  # type: ignore[arg-type]
        again = (await http.post(f"{base_url}/v1/env/instances", **request)).json()  # type: ignore[arg-type]
        assert first["instance_id"] == again["instance_id"]
        assert instances.created == 1


CLIENT_VERIFIER = """
def helper(env):
    return env.db("current").table("issues").count()

def validate_task(env, final_answer=None, conversation=None):
    print("called")
    return 1 if final_answer == "42" and conversation == "[]" and helper(env) > 0 else 0
"""


async def test_a_clients_verifier_receives_the_answer_and_runs_in_the_jail() -> None:
    async with _serve() as (base_url, _), _client(base_url) as client:
        row = {"key": "k", "prompt": "p", "env_id": "github", "verifier_func": CLIENT_VERIFIER}
        task = await client.load_task_from_json(row)
        env = await _create(client)
        right = await task.verify_detailed_async(env, final_answer="42", conversation="[]")
        assert (right.success, right.result, right.stdout) == (True, 1.0, "called\n")
        wrong = await task.verify_detailed_async(env, final_answer="41", conversation="[]")
        assert (wrong.success, wrong.result) == (True, 0.0)
        crashing = {**row, "verifier_func": "def main(env):\n    return 1 / 0\n"}
        task = await client.load_task_from_json(crashing)
        failed = await task.verify_detailed_async(env)
        assert (failed.success, failed.result) == (False, None)
        assert "ZeroDivisionError" in failed.error["message"]
        await env.close()


async def _manager(http: httpx.AsyncClient, base_url: str, **fields: Any) -> str:
    """Create an instance and return the URL of its API."""
    response = await http.post(f"{base_url}/v1/env/instances", json={"env_key": "github", **fields})
    return str(response.json()["urls"]["manager"]["api"])
