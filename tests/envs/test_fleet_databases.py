"""A client's SQL stays inside its own instance and within its time."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
from tests.fakes.serving import serving

from skyfleet.envs.fleet.server import fleet_app


async def test_a_query_reaches_no_file_and_does_not_run_for_ever(tmp_path: Path) -> None:
    headers = {"Authorization": "Bearer k"}
    app = fleet_app((), api_key="k")
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


async def test_what_a_client_did_to_its_tables_is_said_to_it_and_not_asked_for_again() -> None:
    headers = {"Authorization": "Bearer k"}
    app = fleet_app((), api_key="k")
    async with serving(app) as base_url, httpx.AsyncClient(headers=headers) as http:
        made = (await http.post(f"{base_url}/v1/env/instances", json={"env_key": "github"})).json()
        manager, tools = made["urls"]["manager"]["api"], f"{made['urls']['root']}mcp"
        for sql in ("drop table issues", 'create table "odd""name" (id integer)'):
            asked = {"query": sql, "read_only": False}
            done = await http.post(f"{manager}/resources/sqlite/current/query", json=asked)
            assert done.json()["success"]
        call = {"name": "get_issue", "arguments": {"number": 1}}
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}
        told = (await http.post(tools, json=message)).json()["result"]
        assert told["isError"]
        assert told["content"][0]["text"] == (
            "get_issue failed: no such table: issues; reset the instance"
        )
        described = await http.get(f"{manager}/resources/sqlite/current/describe")
        compared = await http.post(f"{manager}/diff/structured", json={})
        for answer in (described, compared):
            assert answer.status_code == 200
            assert not answer.json()["success"]
            assert "syntax error" in answer.json()["error"]
