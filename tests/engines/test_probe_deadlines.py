"""The first request to a server has a deadline and a size limit, and its error names the key."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest
from tests.engines.broken_servers import CHUNKED, ENDLESS, HEAD, repeating, responding, sending
from tests.fakes.broken_http import Behaviour, broken_http

from skyfleet.api.inference import PolicyEngine, _find_model_name, open_no_env
from skyfleet.api.models import ModelSource
from skyfleet.config.loading import load_config
from skyfleet.engines.openai_engine import OpenAIEngine
from skyfleet.engines.servers import discover_server
from skyfleet.engines.vllm_routes import VllmRoutes
from skyfleet.engines.vllm_server import open_vllm_server, reject_sleeping_server
from skyfleet.errors import ConfigError

Probe = Callable[[str], Awaitable[object]]
SECONDS = 0.3


async def discover(url: str) -> object:
    return await discover_server(url, model=None, api_key=None, timeout_seconds=SECONDS)


async def find_model_name(url: str) -> object:
    return await _find_model_name(f"{url}/v1", None, SECONDS)


async def probe_endpoint(url: str) -> object:
    keys = ["generator.served_model_name=m", f"generator.probe_timeout_seconds={SECONDS}"]
    policy = PolicyEngine(ModelSource(url=f"{url}/v1"), load_config("", keys))
    try:
        return await policy.open([], open_no_env)
    finally:
        await policy.aclose()


async def evaluate_vllm(url: str) -> None:
    async with VllmRoutes(url) as routes:
        await reject_sleeping_server(routes, timeout_seconds=SECONDS)


async def train_vllm(url: str) -> object:
    async with VllmRoutes(url) as routes, OpenAIEngine(f"{url}/v1", model="m") as inner:
        return await open_vllm_server(
            inner, routes, may_sleep=False, sizes={}, timeout_seconds=SECONDS
        )


PROBES = (discover, find_model_name, probe_endpoint, evaluate_vllm, train_vllm)
SILENT: dict[str, Behaviour] = {
    "hangs": sending(then="hang"),
    "hangs inside the body": sending(HEAD + b"Content-Length: 9\r\n\r\n{", then="hang"),
    "drips": repeating(HEAD + b"Content-Length: 99999\r\n\r\n{", b" ", seconds=0.02),
}


@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize("name", SILENT)
async def test_a_server_that_does_not_answer_its_first_request_is_refused_in_time(
    probe: Probe, name: str
) -> None:
    async with broken_http(SILENT[name], accepts=False) as url:
        with pytest.raises(
            ConfigError,
            match=r"did not answer within 0\.3 s \(generator\.probe_timeout_seconds\); .* the key",
        ):
            await probe(url)


@pytest.mark.parametrize("probe", [discover, find_model_name, train_vllm])
async def test_an_endless_answer_to_the_first_request_is_cut(probe: Probe) -> None:
    async with broken_http(repeating(CHUNKED, ENDLESS * 100), accepts=False) as url:
        with pytest.raises(ConfigError, match=r"sent more than|did not answer within"):
            await probe(url)


@pytest.mark.parametrize("probe", [discover, find_model_name, train_vllm])
@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b"null", b"\xff", b'{"data": 7}', b'{"version": 7}', b'{"data": []}']
)
async def test_an_odd_answer_to_the_first_request_is_one_sentence(
    probe: Probe, body: bytes
) -> None:
    async with broken_http(responding(body), accepts=False) as url:
        with pytest.raises(ConfigError) as caught:
            await probe(url)
    assert "\n" not in str(caught.value)
    assert url in str(caught.value)


async def test_control_routes_are_asked_for_a_body_without_compression() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        (encoding,) = [line for line in head.split("\r\n") if line.startswith("accept-encoding")]
        body = json.dumps({"version": encoding}).encode()
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        writer.close()

    async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with VllmRoutes(f"http://127.0.0.1:{port}") as routes:
            assert await routes.version() == "accept-encoding: identity"
