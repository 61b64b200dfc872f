"""Weights are pushed between the turns of a pool, and each turn records its policy version."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from tests.fakes.tiny_policy import tiny_policy
from torch import Tensor

from skyfleet.algorithms.sample import Sample
from skyfleet.engines.engine import Engine
from skyfleet.engines.engine_pool import EnginePool
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.learner.learner import Learner, StepReport
from skyfleet.weight_sync.sync import InProcessSync, PausedSync

SAMPLING = SamplingParams(max_generate_length=12, seed=1)


class FakeLearner:
    """The part of a learner that a sync uses."""

    policy_version = 1
    is_within_update = False

    async def step(self, samples: Sequence[Sample]) -> StepReport:
        raise NotImplementedError

    sft_step = step

    def renew_reference(self) -> None: ...

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())

    def save(self, folder: object) -> None: ...

    def load(self, folder: object) -> None: ...


class SlowSync:
    """Pushes like the real one, after `gate` opens."""

    def __init__(self) -> None:
        self.gate, self.began = asyncio.Event(), asyncio.Event()

    async def push(self, learner: Learner, engines: Sequence[Engine]) -> int:
        self.began.set()
        await self.gate.wait()
        return await InProcessSync().push(learner, engines)

    async def verify(self, engines: Sequence[Engine]) -> None: ...


async def test_a_running_turn_keeps_its_version_and_the_next_waits_for_the_new_one() -> None:
    engines = [tiny_policy().engine(), tiny_policy().engine()]
    pool = EnginePool(engines)
    slow = SlowSync()
    running = asyncio.create_task(pool.generate([5, 6], SAMPLING, session="a"))
    await asyncio.sleep(0)
    pushing = asyncio.create_task(PausedSync(slow, pool).push(FakeLearner(), engines))
    await slow.began.wait()
    waiting = asyncio.create_task(pool.generate([5, 7], SAMPLING, session="b"))
    assert (await running).policy_version == 0
    assert not waiting.done()
    slow.gate.set()
    assert await pushing == 1
    assert (await waiting).policy_version == 1
    assert {engine.policy_version for engine in engines} == {1}
