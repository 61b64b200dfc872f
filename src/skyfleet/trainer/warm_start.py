"""Warm start: imitate reference solutions until the policy can be reinforced at all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random

from skyfleet.algorithms.sample import Sample
from skyfleet.trainer.run import Run


async def warm_start(run: Run) -> None:
    total, done = run.schedule.warm_start_steps, run.state.warm_start_step
    if done >= total:
        return
    async with run.resting():
        with run.console.progress("warm start", total, done=done) as advance:
            while run.state.warm_start_step < total:
                # Where Ctrl-C is heard: before a step, so that no step's numbers are ever lost.
                await asyncio.sleep(0)
                step = run.state.warm_start_step
                batch = lesson(run.demonstrations, run.warm_start_batch_size, step, seed=run.seed)
                report = await run.learner.imitate(batch)
                run.state.warm_start_step = step + 1
                advance()
        run.log.add({f"warm_start/{name}": value for name, value in report.metrics.items()})
        run.reach()
        await asyncio.sleep(0)
        await run.sync.push(run.learner, run.engines)


def lesson(samples: Sequence[Sample], size: int, step: int, *, seed: int) -> list[Sample]:
    """What to imitate at a step: every demonstration once an epoch, in the epoch's own order."""
    size = min(size, len(samples))
    epoch, place = divmod(step, len(samples) // size)
    order = list(range(len(samples)))
    Random(f"{seed}/{epoch}").shuffle(order)
    return [samples[i] for i in order[place * size : (place + 1) * size]]
