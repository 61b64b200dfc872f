"""A request that is not well made is answered by one sentence, and never by a 500."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from tests.fakes.serving import serving

from skyfleet.worlds.fleet_server import listings
from skyfleet.worlds.fleet_server.server import fleet_app


async def test_params_that_are_no_object_are_refused_by_the_tools() -> None:
    async with _client() as http:
        urls = await _made(http)
        for method in ("initialize", "ping", "tools/list", "tools/call"):
            message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": [1]}
            answer = await http.post(f"{urls['root']}mcp", json=message)
            assert answer.status_code == 200
            assert answer.json()["error"]["message"] == "params=[1]; send an object"


@pytest.mark.parametrize(
    "code", ["-" * 100_000 + "1", "(" * 300 + ")" * 300, "\0", "\ud800", "x ="]
)
async def test_source_that_cannot_be_read_has_graded_nothing(code: str) -> None:
    async with _client() as http:
        manager = (await _made(http))["manager"]["api"]
        asked = json.dumps({"function_code": code, "function_name": "main"})
        answer = await http.post(f"{manager}/execute_verifier_function", content=asked)
        assert answer.status_code == 200
        assert not answer.json()["success"]
        assert "function_code cannot be read" in answer.json()["error"]


async def test_a_body_nested_too_deeply_is_refused_by_every_route() -> None:
    deep = "[" * 100_000 + "]" * 100_000
    async with _client() as http:
        urls = await _made(http)
        for url in ("/v1/env/instances", f"{urls['root']}mcp"):
            answer = await http.post(url, content=deep)
            assert answer.status_code == 400
            assert "nested too deeply" in answer.json()["detail"]


async def test_what_nobody_foresaw_is_one_sentence_and_a_traceback_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("by nought")

    monkeypatch.setattr(listings, "account", fail)
    unwritable = json.dumps({"env_key": "github", "env_variables": {"NAME": "\ud800"}})
    async with _client() as http:
        with caplog.at_level(logging.ERROR):
            answer = await http.get("/v1/account")
        assert answer.status_code == 400
        said = "GET /v1/account failed with ZeroDivisionError; correct the request"
        assert answer.json() == {"detail": said}
        assert "by nought" in caplog.text
        assert "Traceback" in caplog.text
        answer = await http.post("/v1/env/instances", content=unwritable)
        assert answer.status_code == 400
        assert "UnicodeEncodeError" in answer.json()["detail"]


@asynccontextmanager
async def _client() -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": "Bearer k"}
    async with (
        serving(fleet_app((), api_key="k")) as base_url,
        httpx.AsyncClient(headers=headers, base_url=base_url) as http,
    ):
        yield http


async def _made(http: httpx.AsyncClient) -> dict[str, Any]:
    """A new instance's addresses."""
    answer = await http.post("/v1/env/instances", json={"env_key": "github"})
    urls: dict[str, Any] = answer.json()["urls"]
    return urls
