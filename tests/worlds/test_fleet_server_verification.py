"""Verifiers from clients: pickles are never unpickled, and source runs only in the jail."""

from __future__ import annotations

import asyncio
import base64
import os
import pickle
from io import BytesIO
from pathlib import Path
from time import perf_counter
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import httpx
import pytest
from tests.fakes.serving import serving

from skyfleet.envs.fleet.bundles import pack
from skyfleet.envs.verifiers.write_verifier import write_verifier
from skyfleet.worlds.fleet_server.server import build_fleet_app
from skyfleet.worlds.fleet_server.verification import read_plain

KEY = "local-key"
HEADERS = {"Authorization": f"Bearer {KEY}"}


async def test_client_verifiers_and_pickles_never_run_outside_the_jail(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "unpickled",))

    huge = BytesIO()
    with ZipFile(huge, "w", ZIP_DEFLATED) as bundle:
        bundle.writestr("verifier.py", "#" * 2_000_000)
    plain = _pickled({"args": (None,), "kwargs": {}})
    cases: list[tuple[dict[str, Any], str]] = [
        ({"args": _pickled({"kwargs": Bomb()})}, "send only strings, numbers, lists and dicts"),
        ({"args": _pickled({"kwargs": {"expected": 5}})}, "takes final_answer and conversation"),
        ({"args": _pickled({"kwargs": {"final_answer": 5}})}, "must be strings"),
        ({"args": _pickled({"kwargs": {"expected": 5, 5: 5}})}, "takes final_answer and"),
        ({"args": _pickled({"kwargs": ["final_answer"]})}, "kwargs is a list, not a dict"),
        ({"args": "AAAA"}, "args: "),
        ({"args": "?"}, "args is not base64"),
        ({"args": plain, "bundle": base64.b64encode(b"PK no zip").decode()}, "not a readable zip"),
        ({"args": plain, "bundle": base64.b64encode(huge.getvalue()).decode()}, "more than"),
        ({"args": plain, "sha256": "00"}, "bundle not found"),
        ({"args": plain, "args_array": [5]}, "names no instance"),
    ]
    app = build_fleet_app((), api_key=KEY)
    async with serving(app) as base_url, httpx.AsyncClient(headers=HEADERS) as http:
        await http.post(f"{base_url}/v1/env/instances", json={"env_key": "github"})
        (instance,) = app.state.instances
        for body, message in cases:
            body = {"args_array": [{"env": instance.id}]} | body
            answer = await http.post(f"{base_url}/v1/verifiers/execute", json=body)
            assert answer.status_code == 400, body
            assert message in answer.json()["detail"]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("route", ["v1/verifiers/execute", "execute_verifier_function"])
async def test_generated_verifiers_run_in_the_jail_too(route: str) -> None:
    code = write_verifier((), None)
    trap = "with recursive n(i) as (select 1 union all select i + 1 from n limit 500) "
    # Each row takes milliseconds in a single step, which SQLite's progress handler cannot interrupt.
    costly = "length(replace(hex(zeroblob(1000000 + i)), '0', 'ab'))"
    app = build_fleet_app((), api_key=KEY)
    async with serving(app) as base_url, httpx.AsyncClient(headers=HEADERS, timeout=60) as http:
        made = await http.post(f"{base_url}/v1/env/instances", json={"env_key": "github"})
        (instance,), manager = app.state.instances, made.json()["urls"]["manager"]["api"]
        for sql in (
            "create table trap (i integer primary key)",
            f"insert into trap {trap} select i from n",
            f"alter table trap add column cost as ({costly})",
        ):
            request = {"query": sql, "read_only": False}
            answer = await http.post(f"{manager}/resources/sqlite/current/query", json=request)
            assert answer.json()["success"]
        body: dict[str, Any] = {"function_code": code, "function_name": "validate_task"}
        url = f"{manager}/{route}"
        if route.startswith("v1"):
            bundle = base64.b64encode(pack(code)).decode()
            body = {"args_array": [{"env": instance.id}], "bundle": bundle, "timeout": 1}
            url = f"{base_url}/{route}"
        start = perf_counter()
        verifying = asyncio.create_task(http.post(url, json=body))
        await asyncio.sleep(0.2)
        health = await http.get(f"{manager}/health")
        assert health.status_code == 200
        assert perf_counter() - start < 1.5, "other requests are served meanwhile"
        verifying.cancel()


def test_a_plain_pickle_reads_as_pickle_would() -> None:
    shared = ["twice"]
    value = {
        "args": (None, True, False, 1, 300, 70_000, -5, 10**20, 2.5, "text", "é" * 300),
        "kwargs": {
            "empty": [{}, (), []],
            "pair": ((1,), (1, 2), (1, 2, 3)),
            "a": shared,
            "b": shared,
        },
    }
    assert read_plain(pickle.dumps(value, protocol=5)) == value
    assert read_plain(pickle.dumps("x" * 70_000, protocol=4)) == "x" * 70_000


@pytest.mark.parametrize(
    "data", [b"", b".", b"\x80\x05", b"\x80\x05}s.", b"N" * 9, b"\x80\x05]\x86."]
)
def test_data_that_is_not_a_pickle_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="pickle"):
        read_plain(data)


def _pickled(value: object) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()
