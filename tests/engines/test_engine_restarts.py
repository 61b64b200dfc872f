"""A pool over engines that are started again: sessions move, and no request is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from skyfleet.chat.transcript import Completion
from skyfleet.engines.engine_pool import MAX_RESTARTS, EnginePool
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.errors import EngineError


class RestartingEngine:
    """Dies in its first `n_deaths` requests; then it needs a moment before it serves again."""

    def __init__(self, token: int, *, n_deaths: int = 0) -> None:
        self.policy_version, self.is_restarting = 0, False
        self.released: list[str] = []
        self._token, self._n_deaths = token, n_deaths
        self._ready = asyncio.Event()
        self._ready.set()

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
    ) -> Completion:
        await self._ready.wait()
        if self._n_deaths:
            self._n_deaths -= 1
            self.is_restarting = True
            self._ready.clear()
            asyncio.get_running_loop().call_later(0.01, self._restart)
            raise EngineError("it died")
        return Completion(
            token_ids=(self._token,), logprobs=(0.0,), finish="stop", policy_version=0
        )

    def _restart(self) -> None:
        self.is_restarting = False
        self._ready.set()

    async def release(self, session: str) -> None:
        self.released.append(session)

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


async def sample(pool: EnginePool, session: str = "s") -> tuple[int, ...]:
    return (await pool.generate([1], SamplingParams(), session=session)).token_ids


async def test_a_session_of_an_engine_that_died_continues_on_another_at_once() -> None:
    first, second = RestartingEngine(1, n_deaths=1), RestartingEngine(2)
    pool = EnginePool([first, second])
    assert await sample(pool) == (2,)
    assert first.is_restarting
    assert await sample(pool) == (2,)
    assert first.released == ["s"]


async def test_requests_wait_for_the_only_engine_that_is_started_again() -> None:
    pool = EnginePool([RestartingEngine(1, n_deaths=2)])
    sampled = await asyncio.gather(sample(pool, "a"), sample(pool, "b"))
    assert list(sampled) == [(1,), (1,)]


async def test_a_request_that_every_restart_loses_fails_in_the_end() -> None:
    pool = EnginePool([RestartingEngine(1, n_deaths=MAX_RESTARTS + 1)])
    with pytest.raises(EngineError, match="it died"):
        await sample(pool)
