"""Warm start: imitate reference solutions until the policy can be reinforced at all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random

from skyfleet.algorithms.sample import Sample
from skyfleet.trainer.run import Run


async def warm_start(run: Run) -> None:
    total = run.schedule.warm_start_steps
    if run.state.warm_start_step >= total:
        return
    with run.console.progress("warm start", total - run.state.warm_start_step) as advance:
        while run.state.warm_start_step < total:
            batch = _batch(run.demonstrations, run.warm_start_batch_size, run.state.warm_start_step)
            report = await run.learner.imitate(batch)
            run.state.warm_start_step += 1
            advance()
            await asyncio.sleep(0)  # where Ctrl-C is heard
    run.log.add({f"warm_start/{name}": value for name, value in report.metrics.items()})
    await run.sync.push(run.learner, run.engines)


def _batch(samples: Sequence[Sample], size: int, step: int) -> list[Sample]:
    """Every demonstration once an epoch, in an order that only the epoch decides."""
    size = min(size, len(samples))
    per_epoch = len(samples) // size
    epoch, place = divmod(step, per_epoch)
    order = list(range(len(samples)))
    Random(epoch).shuffle(order)
    return [samples[i] for i in order[place * size : (place + 1) * size]]
