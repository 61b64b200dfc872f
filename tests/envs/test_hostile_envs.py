"""An environment can only hurt its own episode: the catalogue of hostile_envs.py."""

from __future__ import annotations

import pytest
from tests.envs.hostile_envs import HUGE_KINDS, KINDS, run_kind, run_kinds

QUICK = [
    kind
    for name, kind in KINDS.items()
    if (" returns: " in name or " raises: " in name or name.startswith("converted: "))
    and not name.startswith(("process: ", "sync: "))
    and name not in HUGE_KINDS
]
SAMPLE = (
    "step blocks: spins and catches all",
    "child blocks",
    "step is cancelled by a child",
    "step uncancels",
    "step cancels itself and goes on",
    "step gathers and swallows",
    "reset leaves a task group that fails",
    "info blocks",
    "sync: step stops an iteration",
    "step blocks a thread: spins",
    "callback blocks",
    "close swallows cancellation",
    "child exits",
    "step of 50 MB",
    "sync: step spins",
    "process: kills itself",
)


def test_the_catalogue_has_the_kinds_that_the_examination_had_and_more() -> None:
    assert len(KINDS) >= 200
    assert set(SAMPLE) <= KINDS.keys()


async def test_wrong_values_and_exceptions_end_their_own_episodes_all_in_one_run() -> None:
    results = await run_kinds(QUICK)
    assert {r.kind.name: r.problems for r in results if r.problems} == {}


@pytest.mark.parametrize("name", SAMPLE)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_hostile_environment_ends_its_own_episode_and_no_other(name: str) -> None:
    assert (await run_kind(KINDS[name])).problems == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in KINDS if name not in SAMPLE])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_every_other_kind_too(name: str) -> None:
    assert (await run_kind(KINDS[name])).problems == []
