"""Slow verifiers keep nobody waiting, and to wait for a worker is not the verifier's time."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.fakes.jails import GOOD, NO_BWRAP, SLOW, verifier, verify

from skyfleet.envs.verifiers import jail as jail_module
from skyfleet.envs.verifiers.jail import Jail
from skyfleet.envs.verifiers.lanes import Lane, Lanes, Leases, count_slow, stopped_clock
from skyfleet.envs.verifiers.run_verifier import TimedOutVerifierError
from skyfleet.trajectories.episode_clock import EpisodeClock, EpisodeTimeoutError


async def test_verifiers_take_turns_however_many_episodes_one_has() -> None:
    lane, order = Lane(1), []

    async def take(key: int) -> None:
        await lane.acquire(key)
        order.append(key)
        await asyncio.sleep(0)
        lane.release()

    await asyncio.gather(*(take(key) for key in (1, 1, 1, 1, 2, 3)))
    assert order == [1, 1, 2, 3, 1, 1]


@pytest.mark.parametrize("when", ["waiting", "served"])
async def test_a_cancelled_wait_leaves_its_place_to_the_next(when: str) -> None:
    lane = Lane(1)
    await lane.acquire(0)
    first, second = (asyncio.create_task(lane.acquire(key)) for key in (1, 2))
    await asyncio.sleep(0)
    if when == "served":
        lane.release()
    first.cancel()
    if when == "waiting":
        await asyncio.sleep(0)
        lane.release()
    await second
    assert first.cancelled()
    lane.release()
    assert lane.try_acquire()
    assert not lane.try_acquire()


async def test_a_slow_verifier_frees_its_place_and_queues_among_the_slow_ones_next_time() -> None:
    lanes = Lanes(n_workers=1)
    place = await lanes.enter(1)
    assert place.is_fast
    assert place.move_to_slow()
    other = await lanes.enter(2)  # the place that is free again
    other.leave()
    place.leave()
    place = await lanes.enter(1)
    assert not place.is_fast
    lanes.remember(1, slow=False)
    assert (await lanes.enter(1)).is_fast


@pytest.mark.parametrize("n_endless", [2, pytest.param(10, marks=pytest.mark.exhaustive)])
async def test_endless_verifiers_do_not_hold_up_others(
    monkeypatch: pytest.MonkeyPatch, n_endless: int
) -> None:
    """Ten are more than fit beside the others: those are stopped and queue again."""
    monkeypatch.setattr(jail_module, "SOFT_SECONDS", 0.5)
    with Jail(n_workers=1, bwrap=NO_BWRAP) as jail:
        await verify(jail, GOOD)
        endless = [
            asyncio.create_task(verify(jail, f"{SLOW} # {n}", 600)) for n in range(n_endless)
        ]
        await asyncio.sleep(0)
        grades = await asyncio.gather(*(verify(jail, verifier(f"return {n}")) for n in range(8)))
        assert [grade.reward for grade in grades] == [float(n) for n in range(8)]
        assert not any(task.done() for task in endless)
        for task in endless:
            task.cancel()
        await asyncio.gather(*endless, return_exceptions=True)
        assert (await verify(jail, GOOD)).success
        assert len(jail.pids) == 1, "extra workers end with what they ran"


async def test_a_verifier_that_was_stopped_to_queue_again_gets_its_grade(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jail_module, "SOFT_SECONDS", 0.02)
    body = "import time; time.sleep(0.1); return {}"
    with Jail(n_workers=1, bwrap=NO_BWRAP) as jail:
        grades = await asyncio.gather(*(verify(jail, verifier(body.format(n))) for n in range(12)))
    assert [grade.reward for grade in grades] == [float(n) for n in range(12)]


async def test_the_wait_for_a_worker_is_given_back_to_the_episode() -> None:
    async def wait(*, own_seconds: float) -> None:
        async with EpisodeClock(0.2):
            with stopped_clock():
                await asyncio.sleep(0.5)
            await asyncio.sleep(own_seconds)

    await wait(own_seconds=0)
    with pytest.raises(EpisodeTimeoutError):
        await wait(own_seconds=60)


async def test_an_episode_that_queues_longer_than_its_limit_gets_its_grade() -> None:
    async def grade(body: str) -> float:
        async with EpisodeClock(2.0):
            return (await verify(jail, verifier(f"import time; time.sleep(0.4); {body}"))).reward

    with Jail(n_workers=1, bwrap=NO_BWRAP) as jail:
        await verify(jail, GOOD)
        grades = await asyncio.gather(*(grade(f"return {n}") for n in range(7)))
    assert grades == [float(n) for n in range(7)]


def test_threads_with_event_loops_of_their_own_share_the_workers() -> None:
    seen: list[int] = []

    def grade(number: int) -> float:
        async def wait() -> float:
            async with EpisodeClock(20):
                grade = await verify(
                    jail, verifier(f"import time; time.sleep(0.05); return {number}")
                )
                seen.append(len(jail.pids))
                return grade.reward

        return asyncio.run(wait())

    with Jail(n_workers=1, bwrap=NO_BWRAP) as jail, ThreadPoolExecutor(24) as threads:
        assert list(threads.map(grade, range(24))) == [float(n) for n in range(24)]
    assert max(seen) <= 1 + count_slow(1) + 2, "two more may start between a look and a lease"


async def test_a_lease_that_nobody_gives_back_ends() -> None:
    leases = Leases(1)
    await leases.acquire(0.05)
    lease = await leases.acquire(60)
    waiting = asyncio.create_task(leases.acquire(60))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    leases.release(lease)
    await waiting


async def test_the_clock_of_another_loop_is_stopped_too() -> None:
    def wait() -> None:
        async def sleep() -> None:
            with stopped_clock():
                await asyncio.sleep(0.5)

        asyncio.run(sleep())

    async with EpisodeClock(0.2) as clock:
        await asyncio.to_thread(wait)
        assert not clock.has_expired


async def test_a_verifiers_time_starts_with_its_worker() -> None:
    """Six in a row take longer than any of them may."""
    code = "import time; time.sleep(0.4); return 1"
    with Jail(n_workers=1, bwrap=NO_BWRAP) as jail:
        grades = await asyncio.gather(*(verify(jail, verifier(code), 2) for _ in range(6)))
        with pytest.raises(TimedOutVerifierError, match=r"longer than 0\.1 s"):
            await verify(jail, verifier(code), 0.1)
    assert all(grade.success for grade in grades)
