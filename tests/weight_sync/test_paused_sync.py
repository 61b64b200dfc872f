"""Weights arrive between turns of a router's sessions, and each turn says which spoke it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tests.fakes.tiny_speaker import tiny_speaker

from skyfleet.algorithms.sample import Sample
from skyfleet.engines.engine import Engine
from skyfleet.engines.engine_pool import Router
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.learner.learner import Learner, StepReport
from skyfleet.weight_sync.sync import InProcessSync, PausedSync

SAMPLING = SamplingParams(max_generate_length=12, seed=1)


class Taught:
    """A learner as far as a sync asks."""

    policy_version = 1

    async def step(self, samples: Sequence[Sample]) -> StepReport:
        raise NotImplementedError

    imitate = step

    def renew_reference(self) -> None: ...

    def save(self, folder: object) -> None: ...

    def load(self, folder: object) -> None: ...


class SlowSync:
    """Hands over as the real one does, after `gate` opens."""

    def __init__(self) -> None:
        self.gate, self.began = asyncio.Event(), asyncio.Event()

    async def push(self, learner: Learner, engines: Sequence[Engine]) -> int:
        self.began.set()
        await self.gate.wait()
        return await InProcessSync().push(learner, engines)

    async def confirm(self, engines: Sequence[Engine]) -> None: ...


async def test_a_turn_under_way_keeps_its_version_and_the_next_waits_for_the_new_one() -> None:
    engines = [tiny_speaker().engine(), tiny_speaker().engine()]
    router = Router(engines)
    slow = SlowSync()
    under_way = asyncio.create_task(router.generate([5, 6], SAMPLING, session="a"))
    await asyncio.sleep(0)
    pushing = asyncio.create_task(PausedSync(slow, router).push(Taught(), engines))
    await slow.began.wait()
    waiting = asyncio.create_task(router.generate([5, 7], SAMPLING, session="b"))
    assert (await under_way).policy_version == 0
    assert not waiting.done()
    slow.gate.set()
    assert await pushing == 1
    assert (await waiting).policy_version == 1
    assert {engine.policy_version for engine in engines} == {1}
