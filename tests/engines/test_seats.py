"""Engines that fail, hang or break turns off: whom the next turn asks, and how often."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest
from tests.engines.test_router import SAMPLING, Recorded, say

from skyfleet.chat.transcript import Completion, Finish
from skyfleet.engines import engine_pool as seats
from skyfleet.engines.engine_pool import Router
from skyfleet.engines.http_client import RefusedError
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.errors import EngineError


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets so many seconds pass."""
    now = 1000.0

    def later(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(seats, "monotonic", lambda: now)
    return later


async def test_who_failed_before_a_refusal_rests() -> None:
    failing, refusing = Recorded(EngineError("gone")), Recorded(RefusedError("too long"))
    router = Router([failing, refusing])
    with pytest.raises(RefusedError):
        await say(router, "a")
    refusing.error = None
    await say(router, "b")
    assert failing.sessions == ["a"]


async def test_a_turn_that_outlasts_its_episode_lets_its_engine_rest(
    wait: Callable[[float], None],
) -> None:
    hanging, other = Recorded(), Recorded()
    router = Router([hanging, other])
    hanging.gate.clear()
    turn = asyncio.create_task(say(router, "a"))
    await asyncio.sleep(0)
    wait(31)
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    await router.release("a")
    await asyncio.wait_for(say(router, "b"), 5)
    assert (hanging.sessions, other.sessions) == (["a"], ["b"])


async def test_a_turn_cancelled_at_once_says_nothing_of_its_engine() -> None:
    engine, other = Recorded(), Recorded()
    router = Router([engine, other])
    engine.gate.clear()
    turn = asyncio.create_task(say(router, "a"))
    await asyncio.sleep(0)
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    await router.release("a")
    engine.gate.set()
    await say(router, "b")
    assert engine.sessions == ["a", "b"]


async def test_an_engine_that_rested_gets_one_turn_at_a_time_until_it_gives_one(
    wait: Callable[[float], None],
) -> None:
    doubtful, other = Recorded(EngineError("gave no answer")), Recorded()
    router = Router([doubtful, other])
    await say(router, "a")
    wait(31)
    doubtful.error = None
    doubtful.gate.clear()
    probe = asyncio.create_task(say(router, "b"))
    await asyncio.sleep(0)
    await asyncio.wait_for(say(router, "c"), 5)
    await asyncio.wait_for(say(router, "d"), 5)
    assert (doubtful.sessions, other.sessions) == (["a", "b"], ["a", "c", "d"])
    doubtful.gate.set()
    await probe
    doubtful.gate.clear()
    turns = [asyncio.create_task(say(router, session)) for session in ("e", "f")]
    await asyncio.sleep(0)
    doubtful.gate.set()
    await asyncio.gather(*turns)
    assert doubtful.sessions == ["a", "b", "e", "f"]


class Parts(Recorded):
    """Says these in turn, and breaks off every part but the last."""

    def __init__(self, *parts: Sequence[int]) -> None:
        super().__init__()
        self._parts = list(parts)

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
    ) -> Completion:
        await super().generate(token_ids, sampling, session=session)
        said = tuple(self._parts.pop(0))
        finish: Finish = "abort" if self._parts else "length"
        logprobs = tuple(-float(token) for token in said)
        return Completion(token_ids=said, logprobs=logprobs, finish=finish, policy_version=0)


async def test_a_turn_broken_off_before_its_first_token_goes_on_elsewhere() -> None:
    breaking, other = Parts((), (), ()), Recorded()
    assert (await say(Router([breaking, other]), "a")).token_ids == (1,)
    assert (len(breaking.asked), len(other.asked)) == (1, 1)


async def test_engines_that_only_break_off_are_asked_once_each() -> None:
    engines = [Parts((), (), ()), Parts((), (), ())]
    with pytest.raises(EngineError, match="broke a turn off before its first token"):
        await say(Router(engines), "a")
    assert [len(engine.asked) for engine in engines] == [1, 1]


async def test_a_stop_string_across_a_break_ends_the_turn_where_it_is_complete() -> None:
    def letters(token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    parts = [list(map(ord, "so <e")), list(map(ord, "nd> and more"))]
    sampling = SamplingParams(max_generate_length=40, stop=("<end>",))
    router = Router([Parts(*parts)], decode_text=letters)
    said = await router.generate([5], sampling, session="a")
    assert (letters(said.token_ids), said.finish) == ("so <end>", "stop")
    assert said.logprobs == tuple(-float(token) for token in said.token_ids)
    whole = await Router([Parts(*parts)], decode_text=letters).generate([5], SAMPLING, session="a")
    assert letters(whole.token_ids) == "so <end> and more"
