"""Engines that fulfil the contract: in this process, in a pool, and over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.engines.contract import PROMPT, SAMPLING, EngineContract
from tests.fakes.serving import serving
from tests.fakes.tiny_policy import CAPACITY, MODEL, tiny_policy

from skyfleet.engines.cuda.engine import CudaEngine
from skyfleet.engines.engine import Engine
from skyfleet.engines.engine_pool import EnginePool
from skyfleet.engines.openai_engine import OpenAIEngine


class TestEmbedded(EngineContract):
    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Engine]:
        self.behind = [tiny_policy().engine()]
        yield self.behind[0]


class TestCuda(EngineContract):
    """On plain torch where there is no GPU."""

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Engine]:
        policy_model = tiny_policy()
        engine = CudaEngine(
            policy_model.decoder,
            decode_text=policy_model.renderer.text,
            max_num_seqs=16,
            capacity=CAPACITY,
            steps_per_round=4,
        )
        self.behind = [engine]
        yield engine

    async def test_a_turn_prefills_only_new_tokens(self) -> None:
        """In whole blocks of 16: three of them hold 48 of the 54 tokens."""
        async with self.opened() as engine:
            completion = await engine.generate(PROMPT, SAMPLING, session="s")
            assert self._computed() == 40 + 12
            await engine.generate([*PROMPT, *completion.token_ids, 50, 51], SAMPLING, session="s")
            assert self._computed() == 40 + 12 + 6 + 12


class TestEnginePool(EngineContract):
    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Engine]:
        self.behind = [tiny_policy().engine() for _ in range(3)]
        yield EnginePool(self.behind)


class TestOpenAI(EngineContract):
    """Against our own server, on loopback."""

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Engine]:
        self.behind = [tiny_policy().engine()]
        async with (
            serving(tiny_policy().app(self.behind[0])) as url,
            OpenAIEngine(f"{url}/v1", model=MODEL) as engine,
        ):
            yield engine
