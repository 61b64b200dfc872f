"""The clock counts an episode's own time: not a blocked event loop, and engine failures apart."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from skyfleet.trajectories.episode_clock import (
    EpisodeClock,
    EpisodeTimeoutError,
    current_clock,
    running_clocks,
)


async def test_the_limit_raises_and_names_its_key() -> None:
    with pytest.raises(EpisodeTimeoutError, match=r"0\.02 s \(generator.trajectory_timeout_seco"):
        async with EpisodeClock(0.02):
            await asyncio.sleep(60)
    assert (list(running_clocks()), current_clock.get()) == ([], None)


async def test_time_given_back_moves_the_limit() -> None:
    async with EpisodeClock(0.05) as clock:
        assert current_clock.get() is clock
        clock.extend(30)
        await asyncio.sleep(0.1)
    assert not clock.has_expired


async def test_time_given_back_after_the_loop_was_blocked_beyond_the_limit_still_counts() -> None:
    async with EpisodeClock(0.05) as clock:
        asyncio.get_running_loop().call_later(0.001, clock.extend, 0.5)
        time.sleep(0.3)  # noqa: ASYNC251
        await asyncio.sleep(0.01)
    assert not clock.has_expired


@pytest.mark.parametrize(("loss", "finishes"), [(0.0, False), (0.00005, False), (0.04, True)])
async def test_a_limit_that_expired_by_the_engines_loss_is_known(
    loss: float, finishes: bool
) -> None:
    clock = EpisodeClock(0.05)
    clock.add_engine_downtime(loss)
    with pytest.raises(EpisodeTimeoutError):
        async with clock:
            await asyncio.sleep(60)
    assert clock.would_have_finished is finishes


async def test_a_timeout_of_something_inside_is_not_the_episodes() -> None:
    with pytest.raises(TimeoutError, match="inside") as caught:
        async with EpisodeClock(5):
            raise TimeoutError("inside")
    assert not isinstance(caught.value, EpisodeTimeoutError)


async def test_cancellation_passes_through_and_no_limit_never_expires() -> None:
    async def wait() -> None:
        async with EpisodeClock(0) as clock:
            assert not clock.has_expired
            await asyncio.sleep(60)

    task = asyncio.create_task(wait())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_deferred_expiry_uses_nothing_that_comes_after_the_limit() -> None:
    async def wait(clock: EpisodeClock, defer: Callable[[], float], seconds: float) -> None:
        async with clock:
            clock.defer_expiry = defer
            await asyncio.sleep(seconds)
            await clock.expire_deferred()
            raise AssertionError("it was used")

    left = [0.02, 0.02, 0.0]
    with pytest.raises(EpisodeTimeoutError):
        await wait(EpisodeClock(0.02), lambda: left.pop(0), 60)
    assert left == []
    with pytest.raises(EpisodeTimeoutError):
        await wait(EpisodeClock(0.02), lambda: 60.0, 0.1)


async def test_an_expiry_that_was_not_deferred_is_left_to_the_timer() -> None:
    async with EpisodeClock(0.02) as clock:
        time.sleep(0.05)  # noqa: ASYNC251 - a blocked event loop, whose time is given back
        await clock.expire_deferred()
        clock.extend(0.05)
        await asyncio.sleep(0)
        assert not clock.has_expired
