"""Failover of the engine pool: engines that fail, hang or abort turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest
from tests.engines.test_engine_pool import SAMPLING, Recorded, generate

from skyfleet.chat.transcript import Completion, Finish
from skyfleet.engines import engine_pool
from skyfleet.engines.engine_pool import EnginePool
from skyfleet.engines.http_client import RequestRejectedError
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.errors import EngineError


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Advance the clock."""
    now = 1000.0

    def later(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(engine_pool, "monotonic", lambda: now)
    return later


async def test_an_engine_that_failed_before_a_rejection_cools_down() -> None:
    failing, refusing = Recorded(EngineError("gone")), Recorded(RequestRejectedError("too long"))
    pool = EnginePool([failing, refusing])
    with pytest.raises(RequestRejectedError):
        await generate(pool, "a")
    refusing.error = None
    await generate(pool, "b")
    assert failing.sessions == ["a"]


async def test_an_engine_that_hangs_past_the_episode_timeout_cools_down(
    wait: Callable[[float], None],
) -> None:
    hanging, other = Recorded(), Recorded()
    pool = EnginePool([hanging, other])
    hanging.gate.clear()
    turn = asyncio.create_task(generate(pool, "a"))
    await asyncio.sleep(0)
    wait(31)
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    await pool.release("a")
    await asyncio.wait_for(generate(pool, "b"), 5)
    assert (hanging.sessions, other.sessions) == (["a"], ["b"])


async def test_a_turn_cancelled_at_once_does_not_count_as_a_failure() -> None:
    engine, other = Recorded(), Recorded()
    pool = EnginePool([engine, other])
    engine.gate.clear()
    turn = asyncio.create_task(generate(pool, "a"))
    await asyncio.sleep(0)
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    await pool.release("a")
    engine.gate.set()
    await generate(pool, "b")
    assert engine.sessions == ["a", "b"]


async def test_after_the_cooldown_an_engine_gets_one_turn_at_a_time_until_it_succeeds(
    wait: Callable[[float], None],
) -> None:
    unreliable, other = Recorded(EngineError("gave no answer")), Recorded()
    pool = EnginePool([unreliable, other])
    await generate(pool, "a")
    wait(31)
    unreliable.error = None
    unreliable.gate.clear()
    probe = asyncio.create_task(generate(pool, "b"))
    await asyncio.sleep(0)
    await asyncio.wait_for(generate(pool, "c"), 5)
    await asyncio.wait_for(generate(pool, "d"), 5)
    assert (unreliable.sessions, other.sessions) == (["a", "b"], ["a", "c", "d"])
    unreliable.gate.set()
    await probe
    unreliable.gate.clear()
    turns = [asyncio.create_task(generate(pool, session)) for session in ("e", "f")]
    await asyncio.sleep(0)
    unreliable.gate.set()
    await asyncio.gather(*turns)
    assert unreliable.sessions == ["a", "b", "e", "f"]


class Parts(Recorded):
    """Returns these in order, and aborts every part but the last."""

    def __init__(self, *parts: Sequence[int]) -> None:
        super().__init__()
        self._parts = list(parts)

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
    ) -> Completion:
        await super().generate(token_ids, sampling, session=session)
        completion = tuple(self._parts.pop(0))
        finish: Finish = "abort" if self._parts else "length"
        logprobs = tuple(-float(token) for token in completion)
        return Completion(token_ids=completion, logprobs=logprobs, finish=finish, policy_version=0)


async def test_a_turn_aborted_before_its_first_token_moves_to_another_engine() -> None:
    aborting, other = Parts((), (), ()), Recorded()
    assert (await generate(EnginePool([aborting, other]), "a")).token_ids == (1,)
    assert (len(aborting.requests), len(other.requests)) == (1, 1)


async def test_engines_that_only_abort_are_tried_once_each() -> None:
    engines = [Parts((), (), ()), Parts((), (), ())]
    with pytest.raises(EngineError, match="aborted a turn before its first token"):
        await generate(EnginePool(engines), "a")
    assert [len(engine.requests) for engine in engines] == [1, 1]


async def test_a_stop_string_across_an_abort_ends_the_turn() -> None:
    def letters(token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    parts = [list(map(ord, "so <e")), list(map(ord, "nd> and more"))]
    sampling = SamplingParams(max_generate_length=40, stop=("<end>",))
    pool = EnginePool([Parts(*parts)], decode_text=letters)
    completion = await pool.generate([5], sampling, session="a")
    assert (letters(completion.token_ids), completion.finish) == ("so <end>", "stop")
    assert completion.logprobs == tuple(-float(token) for token in completion.token_ids)
    whole = await EnginePool([Parts(*parts)], decode_text=letters).generate(
        [5], SAMPLING, session="a"
    )
    assert letters(whole.token_ids) == "so <end> and more"
