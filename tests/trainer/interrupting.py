"""Cancels a training run inside a chosen call, for tests that resume it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pkgutil import resolve_name
from typing import Any

import pytest

from skyfleet.config.root import RunConfig
from skyfleet.trainer.training_run import run_training

AsyncFunction = Callable[..., Awaitable[Any]]


async def interrupt_training(config: RunConfig, within: str, *, call: int, loops: int) -> None:
    """Cancel the run in the `call`-th call of `within` (`module:function`), after `loops` yields."""
    run = asyncio.create_task(run_training(config))
    calls = 0
    canceller: asyncio.Task[None] | None = None

    async def cancel_soon() -> None:
        for _ in range(loops):
            await asyncio.sleep(0)
        run.cancel()

    def wrap(function: AsyncFunction) -> AsyncFunction:
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls, canceller
            calls += 1
            if calls == call:
                canceller = asyncio.create_task(cancel_soon())
            return await function(*args, **kwargs)

        return wrapper

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(within.replace(":", "."), wrap(resolve_name(within)))
        with pytest.raises(asyncio.CancelledError):
            await run
    assert calls >= call
    assert canceller is not None
    await canceller
    assert asyncio.all_tasks() == {asyncio.current_task()}
