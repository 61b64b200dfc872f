"""A server is looked for before anything is played, and what is wrong with it is one sentence."""

from __future__ import annotations

import pytest
from tests.fakes.serving import serving
from tests.fakes.tiny_speaker import MODEL, tiny_speaker

from skyfleet.engines.servers import Server, base_url, find_server
from skyfleet.errors import ConfigError


def test_an_address_is_written_shortly_or_in_full() -> None:
    for address in ("host:8000", "http://host:8000", "http://host:8000/", "http://host:8000/v1/"):
        assert base_url(address) == "http://host:8000/v1"
    assert base_url("https://host/models/mine") == "https://host/models/mine"


async def test_the_only_model_of_a_server_need_not_be_named() -> None:
    speaker = tiny_speaker()
    async with serving(speaker.app(speaker.engine(), api_key="k")) as url:
        found = await find_server(url, model=None, api_key="k")
        assert found == Server(url=f"{url}/v1", model=MODEL)
        assert await find_server(url, model=MODEL, api_key="k") == found
        with pytest.raises(ConfigError, match=rf"serves \['{MODEL}'\], not .*'other'"):
            await find_server(url, model="other", api_key="k")
        with pytest.raises(ConfigError, match="401; it wants a key: set OPENAI_API_KEY"):
            await find_server(url, model=None, api_key=None)


@pytest.mark.parametrize("address", ["127.0.0.1:9", "http://127.0.0.1:nine"])
async def test_an_address_where_nobody_answers_is_named(address: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^generator\.remote_inference_engine_urls: http://127\.0\.0\.1:"
    ):
        await find_server(address, model=None, api_key=None)
