"""A client's SQL is confined to its instance and limited in time and size."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from tests.fakes.serving import serving

from skyfleet.worlds.database import Database
from skyfleet.worlds.fleet_server.databases import DiffRequest, QueryRequest, difference, query
from skyfleet.worlds.fleet_server.instances import CreateRequest, Instance, InstancePool
from skyfleet.worlds.fleet_server.server import build_fleet_app


async def test_a_query_cannot_open_files_and_is_limited_in_time(tmp_path: Path) -> None:
    headers = {"Authorization": "Bearer k"}
    app = build_fleet_app((), api_key="k")
    async with serving(app) as base_url, httpx.AsyncClient(headers=headers) as http:
        made = await http.post(f"{base_url}/v1/env/instances", json={"env_key": "github"})
        url = made.json()["urls"]["manager"]["api"] + "/resources/sqlite/current/query"
        for sql in (f"attach '{tmp_path}/a' as a", f"vacuum into '{tmp_path}/b'"):
            answer = await http.post(url, json={"query": sql, "read_only": False})
            assert not answer.json()["success"]
        endless = (
            "with recursive n(i) as (select 1 union all select i + 1 from n) select max(i) from n"
        )
        answer = await http.post(url, json={"query": endless})
        assert answer.json()["error"] == "interrupted"
        odd = await http.post(url, json={"query": "select x'00ff', 9e999, null"})
        assert odd.json()["rows"] == [["00ff", "inf", None]]
    assert os.listdir(tmp_path) == []


async def test_errors_from_tables_that_a_client_changed_are_reported_and_not_retried() -> None:
    headers = {"Authorization": "Bearer k"}
    app = build_fleet_app((), api_key="k")
    async with serving(app) as base_url, httpx.AsyncClient(headers=headers) as http:
        made = (await http.post(f"{base_url}/v1/env/instances", json={"env_key": "github"})).json()
        manager, tools = made["urls"]["manager"]["api"], f"{made['urls']['root']}mcp"
        for sql in ("drop table issues", 'create table "odd""name" (id integer)'):
            request = {"query": sql, "read_only": False}
            done = await http.post(f"{manager}/resources/sqlite/current/query", json=request)
            assert done.json()["success"]
        call = {"name": "get_issue", "arguments": {"number": 1}}
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}
        result = (await http.post(tools, json=message)).json()["result"]
        assert result["isError"]
        assert result["content"][0]["text"] == (
            "get_issue failed: no such table: issues; reset the instance"
        )
        described = await http.get(f"{manager}/resources/sqlite/current/describe")
        compared = await http.post(f"{manager}/diff/structured", json={})
        for answer in (described, compared):
            assert answer.status_code == 200
            assert not answer.json()["success"]
            assert "syntax error" in answer.json()["error"]


@pytest.fixture
def instance() -> Iterator[Instance]:
    instances = InstancePool(ttl_seconds=60, max_instances=1)
    yield instances.create(CreateRequest(env_key="github", data_key="seed-0"), None)
    instances.close_all()


def run_query(instance: Instance, sql: str) -> dict[str, Any]:
    return query(instance, "current", QueryRequest(query=sql, read_only=False))


@pytest.mark.parametrize(
    ("sql", "error"),
    [
        ("select zeroblob(300000000)", "string or blob too big"),
        ("select zeroblob(9000000)", "the response exceeds 10,000,000 characters"),
        (
            "with recursive n(i) as (select 1 union all select i + 1 from n limit 100)"
            " select zeroblob(1000000) from n",
            "the response exceeds 10,000,000 characters",
        ),
    ],
)
def test_a_response_above_the_size_limit_is_an_error(
    instance: Instance, sql: str, error: str
) -> None:
    start = monotonic()
    assert run_query(instance, sql)["error"].startswith(error)
    assert monotonic() - start < 1
    assert run_query(instance, "select 1")["rows"] == [[1]]


@pytest.mark.parametrize("sql", ["begin", "savepoint a", "commit", "rollback"])
def test_transactions_and_savepoints_are_denied(instance: Instance, sql: str) -> None:
    assert run_query(instance, sql)["error"] == "not authorized"
    assert run_query(instance, "delete from issues")["rows_affected"] > 0
    left = Database(instance.app.db.image())
    assert left.column("select count(*) from issues") == [0]
    left.close()


def test_a_changed_row_shows_its_old_values_for_every_kind_of_primary_key(
    instance: Instance,
) -> None:
    app = instance.app
    seed = Database(app.db.image())
    for state in (seed, app.db):
        state.connection.executescript(
            "create table tags (id, label); insert into tags values (7, 'old');"
            "create table odd (name text primary key, n); insert into odd values (null, 1), (null, 2)"
        )
    app.db.write("update tags set label = 'new'")
    app.db.write("update odd set n = 3 where n = 2")
    with patch.object(instance.world, "image", lambda _: seed.image()):
        diff = difference(instance, DiffRequest())["diff"]
    seed.close()
    assert diff["tags"]["modified_rows"][0]["changes"] == {
        "label": {"before": "old", "after": "new"}
    }
    assert diff["odd"]["modified_rows"][0]["changes"] == {"n": {"before": 2, "after": 3}}
