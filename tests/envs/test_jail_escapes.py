"""No attempt to get out of the jail succeeds, with bubblewrap or with the filter alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from _pytest.mark import ParameterSet
from benchmarks.jail_attempts import ATTEMPTS, Attempt
from benchmarks.jail_escapes import Host, find_escape, open_host
from tests.fakes.jails import KINDS

from skyfleet.envs.verifiers import seccomp
from skyfleet.envs.verifiers.jail import Jail

pytestmark = pytest.mark.skipif(not seccomp.SUPPORTED, reason="the filter is for Linux on x86_64")

_EVERY_DAY = {"answer", "harness", "result"}
"""What depends on our code, and not on the kernel; attempts that take their time are slow."""


def _params() -> list[ParameterSet]:
    seen: set[str] = set()
    params = []
    for attempt in ATTEMPTS:
        is_first = attempt.group not in seen
        seen.add(attempt.group)
        waits = "sleep" in attempt.body or "while True" in attempt.body
        default = (is_first or attempt.group in _EVERY_DAY) and not waits
        marks = () if default else (pytest.mark.exhaustive,)
        params.append(pytest.param(attempt, marks=marks, id=f"{attempt.group}-{attempt.name}"))
    return params


@pytest.fixture(scope="module", params=KINDS)
def jail(request: pytest.FixtureRequest) -> Iterator[Jail]:
    with Jail(n_workers=1, bwrap=request.param) as jail:
        yield jail


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with open_host() as host:
        yield host


@pytest.mark.parametrize("attempt", _params())
async def test_an_attempt_gets_nowhere(jail: Jail, host: Host, attempt: Attempt) -> None:
    assert await find_escape(attempt, jail, host) == ""


def test_there_are_more_than_200_different_attempts() -> None:
    assert len({attempt.body for attempt in ATTEMPTS}) == len(ATTEMPTS) > 200
