"""A failing server is never a score: its episodes have no grade, and its neighbours keep theirs."""

from __future__ import annotations

import asyncio
import re
import tracemalloc

import pytest
from tests.engines.broken_server_runs import KINDS, play
from tests.engines.broken_servers import Client, Kind
from tests.fakes.serving import nothing_left

from skyfleet.engines import http_client
from skyfleet.errors import ConfigError
from skyfleet.trajectories.trajectory import Ending

MAX_BYTES = 48 << 20
"""Of client and server together, for one kind."""
CASES = [(kind, client) for kind in KINDS.values() for client in kind.clients]
FIRST = [(kind, kind.clients[0]) for kind in KINDS.values() if not kind.is_slow]
UNGRADED = [(kind, kind.clients[0]) for kind in KINDS.values() if kind.ends == "ungraded"]
SHORT = (
    "status 500",
    "429, retry in an hour",
    "reset before the answer",
    "truncated body",
    "hangs before the headers",
    "hangs inside the body",
    "drips headers",
    "drips the body",
    "drips whitespace",
    "hangs after 3 requests",
)


def name(value: Kind | Client) -> str:
    return value if isinstance(value, str) else value.name


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "INITIAL_BACKOFF_SECONDS", 0.001)
    monkeypatch.setattr(http_client, "MAX_RETRY_AFTER_SECONDS", 0.001)


async def check_with_time(kind: Kind, client: Client) -> None:
    """The episode has time for all retries, so the server's error ends it."""
    if kind.ends == "stops":
        stopped = pytest.RaisesExc(ConfigError, match=kind.sentence)
        with pytest.RaisesGroup(stopped, flatten_subgroups=True):
            await play(kind, client, limit_seconds=60, attempts=1)
        return
    played = await play(kind, client, limit_seconds=60, timeout_seconds=2.0 if kind.is_slow else 60)
    assert [t.reward for t in played.siblings] == [1.0, 1.0]
    rewards = [t.reward for t in played.broken]
    if kind.ends == "graded":
        assert rewards == [1.0, 1.0]
        return
    assert None in rewards
    for trajectory in played.broken:
        # A server that breaks later may have answered one of them before.
        assert trajectory.reward in (None, 1.0)
        if trajectory.reward is None:
            assert trajectory.ending is Ending.FAILED
            assert trajectory.failure is not None
            assert re.search(kind.sentence, trajectory.failure.detail)
            assert "\n" not in trajectory.failure.detail


async def check_without_time(kind: Kind, client: Client) -> None:
    """The time limit passes while the server fails, is retried or does not answer."""
    played = await play(kind, client, limit_seconds=1.0)
    assert [t.reward for t in played.siblings] == [1.0, 1.0]
    rewards = [t.reward for t in played.broken]
    assert None in rewards
    assert 0.0 not in rewards


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize(("kind", "client"), FIRST, ids=name)
async def test_an_episode_with_a_broken_server_has_no_grade_and_one_sentence(
    kind: Kind, client: Client
) -> None:
    await check_with_time(kind, client)


async def test_a_time_limit_that_passes_because_of_the_server_gives_no_grade() -> None:
    async with asyncio.TaskGroup() as checks:
        for short in SHORT:
            checks.create_task(check_without_time(KINDS[short], KINDS[short].clients[0]))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize(("kind", "client"), CASES, ids=name)
async def test_every_client_survives_every_broken_server_within_bounded_memory(
    kind: Kind, client: Client
) -> None:
    tracemalloc.start()
    try:
        async with nothing_left():
            await check_with_time(kind, client)
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "client"), UNGRADED, ids=name)
async def test_no_broken_server_is_a_score_under_a_short_time_limit(
    kind: Kind, client: Client
) -> None:
    await check_without_time(kind, client)
