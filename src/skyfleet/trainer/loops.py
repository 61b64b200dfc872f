"""Choose the loop of a run: synchronous, or asynchronous with `trainer.fully_async.enabled`."""

from __future__ import annotations

from collections.abc import AsyncIterator

from skyfleet.trainer import loop
from skyfleet.trainer.async_loop import train_steps_async
from skyfleet.trainer.callbacks import StepResult
from skyfleet.trainer.run import Run


async def train(run: Run) -> None:
    """Train from the run's current step to its last."""
    async for _ in train_steps(run):
        pass


def train_steps(run: Run) -> AsyncIterator[StepResult]:
    """Train step by step."""
    if run.group_rollouts is not None:
        return train_steps_async(run, run.group_rollouts)
    return loop.train_steps(run)
