"""An invalid request is answered with one sentence and never with status 500."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from tests.fakes.serving import serving

from skyfleet.worlds.fleet_server import service_routes
from skyfleet.worlds.fleet_server.server import build_fleet_app


async def test_mcp_params_that_are_not_an_object_are_rejected() -> None:
    async with _client() as http:
        urls = await _create(http)
        for method in ("initialize", "ping", "tools/list", "tools/call"):
            message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": [1]}
            answer = await http.post(f"{urls['root']}mcp", json=message)
            assert answer.status_code == 200
            assert answer.json()["error"]["message"] == "params=[1]; send an object"


@pytest.mark.parametrize(
    "code", ["-" * 100_000 + "1", "(" * 300 + ")" * 300, "\0", "\ud800", "x ="]
)
async def test_verifier_source_that_cannot_be_parsed_returns_no_grade(code: str) -> None:
    async with _client() as http:
        manager = (await _create(http))["manager"]["api"]
        request = json.dumps({"function_code": code, "function_name": "main"})
        answer = await http.post(f"{manager}/execute_verifier_function", content=request)
        assert answer.status_code == 200
        assert not answer.json()["success"]
        assert "function_code cannot be parsed" in answer.json()["error"]


async def test_a_body_nested_too_deeply_is_rejected_by_every_route() -> None:
    deep = "[" * 100_000 + "]" * 100_000
    async with _client() as http:
        urls = await _create(http)
        for url in ("/v1/env/instances", f"{urls['root']}mcp"):
            answer = await http.post(url, content=deep)
            assert answer.status_code == 400
            assert "nested too deeply" in answer.json()["detail"]


async def test_an_unexpected_exception_returns_400_and_is_logged_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("by nought")

    monkeypatch.setattr(service_routes, "describe_account", fail)
    unwritable = json.dumps({"env_key": "github", "env_variables": {"NAME": "\ud800"}})
    async with _client() as http:
        with caplog.at_level(logging.ERROR):
            answer = await http.get("/v1/account")
        assert answer.status_code == 400
        detail = "GET /v1/account failed with ZeroDivisionError; correct the request"
        assert answer.json() == {"detail": detail}
        assert "by nought" in caplog.text
        assert "Traceback" in caplog.text
        answer = await http.post("/v1/env/instances", content=unwritable)
        assert answer.status_code == 400
        assert "UnicodeEncodeError" in answer.json()["detail"]


@asynccontextmanager
async def _client() -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": "Bearer k"}
    async with (
        serving(build_fleet_app((), api_key="k")) as base_url,
        httpx.AsyncClient(headers=headers, base_url=base_url) as http,
    ):
        yield http


async def _create(http: httpx.AsyncClient) -> dict[str, Any]:
    """Create an instance and return its URLs."""
    answer = await http.post("/v1/env/instances", json={"env_key": "github"})
    urls: dict[str, Any] = answer.json()["urls"]
    return urls
