"""Server discovery: the model and context of each server, and one sentence for each problem."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from tests.fakes.serving import serving
from tests.fakes.tiny_policy import CAPACITY, MODEL, tiny_policy

from skyfleet.engines.servers import (
    KEY_VARIABLE,
    Server,
    base_url,
    discover_server,
    discover_servers,
    read_api_key,
)
from skyfleet.errors import ConfigError


@asynccontextmanager
async def answering(answer: Response) -> AsyncIterator[str]:
    """A server with this response to GET /v1/models."""

    async def models(request: Request) -> Response:
        return answer

    async with serving(Starlette(routes=[Route("/v1/models", models)])) as url:
        yield url


def listing(*names: str, tokens: int | None = None) -> Response:
    """As vLLM returns it; other servers omit `max_model_len`."""
    return JSONResponse({"data": [{"id": name, "max_model_len": tokens} for name in names]})


def test_an_address_may_be_short_or_complete() -> None:
    for address in ("host:8000", "http://host:8000", "http://host:8000/", "http://host:8000/v1/"):
        assert base_url(address) == "http://host:8000/v1"
    assert base_url("https://host/models/mine") == "https://host/models/mine"


async def test_the_only_model_of_a_server_is_the_default() -> None:
    policy_model = tiny_policy()
    async with serving(policy_model.app(policy_model.engine(), api_key="k")) as url:
        found = await discover_server(url, model=None, api_key="k")
        assert found == Server(
            url=f"{url}/v1",
            model=MODEL,
            model_names=frozenset({MODEL}),
            max_model_len=CAPACITY,
            policy_version=0,
        )
        assert await discover_server(url, model=MODEL, api_key="k") == found
        with pytest.raises(ConfigError, match=rf"serves \['{MODEL}'\], not .*'other'"):
            await discover_server(url, model="other", api_key="k")
        with pytest.raises(ConfigError, match="401; it requires a key: set OPENAI_API_KEY"):
            await discover_server(url, model=None, api_key=None)
        with pytest.raises(ConfigError, match="401; it does not accept the key in OPENAI_API_KEY"):
            await discover_server(url, model=None, api_key="another")


@pytest.mark.parametrize("address", ["127.0.0.1:9", "http://127.0.0.1:nine"])
async def test_an_unreachable_address_is_named(address: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^generator\.remote_inference_engine_urls: http://127\.0\.0\.1:"
    ):
        await discover_server(address, model=None, api_key=None)


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (HTMLResponse("<h1>Welcome</h1>"), "returned no list of models; use the base url"),
        (PlainTextResponse("where?", 404), "returned 404; use the base url without /models"),
        (PlainTextResponse("loading", 503), "returned 503; try again when it is up, or read its"),
        (listing("a", "b"), r"serves \['a', 'b'\]; choose with generator.served_model_name"),
    ],
)
async def test_each_invalid_response_names_its_remedy(answer: Response, sentence: str) -> None:
    async with answering(answer) as url:
        with pytest.raises(ConfigError, match=sentence):
            await discover_server(url, model=None, api_key=None)


async def found(*answers: Response, model: str | None = None, longest: int = 100) -> list[Server]:
    async with AsyncExitStack() as opened:
        urls = [await opened.enter_async_context(answering(answer)) for answer in answers]
        return await discover_servers(urls, model=model, api_key=None, longest=longest)


async def test_every_server_must_have_enough_context() -> None:
    servers = await found(listing("m", tokens=100), listing("m"))
    assert [server.max_model_len for server in servers] == [100, None]
    with pytest.raises(
        ConfigError,
        match=r"v1 supports 99 tokens, but generator\.max_input_length \+ max_generate_length=100",
    ):
        await found(listing("m", tokens=200), listing("m", tokens=99))


async def test_servers_of_different_models_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"serve different models: 'base' at .*, 'mine' at http"):
        await found(listing("base"), listing("mine"))
    servers = await found(listing("base", "mine"), listing("mine"), model="mine")
    assert [server.model for server in servers] == ["mine", "mine"]


async def test_servers_of_different_steps_are_rejected() -> None:
    def at(step: int | None) -> Response:
        return JSONResponse({"data": [{"id": "mine", "policy_version": step}]})

    assert len(await found(at(40), at(40), at(None))) == 3
    with pytest.raises(ConfigError, match=r"different steps of a policy: 40 at .*, 60 at http"):
        await found(at(40), at(60))


@pytest.mark.parametrize("again", ["host:8000", "http://host:8000/v1/"])
async def test_a_duplicate_server_is_rejected(again: str) -> None:
    with pytest.raises(ConfigError, match=r"lists http://host:8000/v1 2 times; list each"):
        await discover_servers(["host:8000", again], model=None, api_key=None, longest=1)


@pytest.mark.parametrize("key", ["schlüssel", "sk-123\n", "sk-1\t23"])
def test_an_invalid_key_is_rejected_without_printing_it(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, key)
    with pytest.raises(ConfigError, match=r"^OPENAI_API_KEY contains a line break or") as refused:
        read_api_key()
    assert key.strip() not in str(refused.value)


@pytest.mark.parametrize(("value", "key"), [("", None), ("sk-1", "sk-1")])
def test_an_empty_key_counts_as_none(
    value: str, key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, value)
    assert read_api_key() == key
