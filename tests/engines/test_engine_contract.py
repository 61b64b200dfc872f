"""The engines that keep the contract: in this process, several as one, and over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.engines.contract import EngineContract
from tests.fakes.serving import serving
from tests.fakes.tiny_speaker import MODEL, tiny_speaker

from skyfleet.engines.engine import Engine
from skyfleet.engines.openai_engine import OpenAIEngine
from skyfleet.engines.router import Router


class TestEmbedded(EngineContract):
    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Engine]:
        self.behind = [tiny_speaker().engine()]
        yield self.behind[0]


class TestRouter(EngineContract):
    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Engine]:
        self.behind = [tiny_speaker().engine() for _ in range(3)]
        yield Router(self.behind)


class TestOpenAI(EngineContract):
    """Against our own server, on loopback."""

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Engine]:
        self.behind = [tiny_speaker().engine()]
        async with (
            serving(tiny_speaker().app(self.behind[0])) as url,
            OpenAIEngine(f"{url}/v1", model=MODEL) as engine,
        ):
            yield engine
