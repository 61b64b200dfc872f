"""The engine of a policy: one at a time, in the event loop that uses it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

import skyfleet as sf
from skyfleet.api.background import run_sync
from skyfleet.api.inference import OpenedEngine, PolicyEngine, open_no_env
from skyfleet.api.models import ModelSource


class CountingEngine(PolicyEngine):
    """Opens nothing, and notes the loops in which it was opened and closed."""

    def __init__(self) -> None:
        super().__init__(ModelSource(path="tiny"))
        self.opened_in: list[Any] = []
        self.closed_in: list[Any] = []

    async def _open(self, loop: asyncio.AbstractEventLoop, *_: Any) -> OpenedEngine:
        self.opened_in.append(loop)
        await asyncio.sleep(0.01)
        closing = AsyncExitStack()
        closing.push_async_callback(self._note_closed)
        agent: Any = None
        return OpenedEngine(loop=loop, closing=closing, agent=agent, client=None, served_name=None)

    async def _note_closed(self) -> None:
        self.closed_in.append(asyncio.get_running_loop())

    async def start(self) -> OpenedEngine:
        return await self.open([], open_no_env)


async def test_concurrent_calls_start_one_engine() -> None:
    engine = CountingEngine()
    first, *others = await asyncio.gather(*(engine.start() for _ in range(4)))
    assert all(other is first for other in others)
    assert len(engine.opened_in) == 1


async def test_an_engine_of_another_loop_is_closed_there_before_the_next_starts() -> None:
    engine = CountingEngine()
    background = run_sync(engine.start()).loop
    await engine.start()
    assert engine.closed_in == [background]
    await engine.aclose()
    assert engine.closed_in == [background, asyncio.get_running_loop()]


async def test_a_sync_call_in_the_loop_of_the_engine_does_not_wait_for_it() -> None:
    engine = CountingEngine()
    await engine.start()
    run_sync(engine.start())
    assert engine.closed_in == []
    await asyncio.sleep(0.01)
    assert engine.closed_in == [asyncio.get_running_loop()]
    run_sync(engine.aclose())


def test_an_engine_whose_loop_has_ended_is_closed() -> None:
    engine = CountingEngine()
    asyncio.run(engine.start())
    asyncio.run(engine.start())
    assert len(engine.closed_in) == 1


async def test_an_engine_that_a_server_uses_is_not_closed() -> None:
    engine = CountingEngine()
    run_sync(engine.start())
    engine.served_at = "http://127.0.0.1:8000/v1"
    with pytest.raises(sf.ConfigError, match="use the URL, or stop the server first"):
        await engine.start()
    assert engine.closed_in == []
