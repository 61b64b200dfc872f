"""Fleet's public FleetTaskEnv and our own client show the agent the same, turn by turn."""

from __future__ import annotations

import asyncio
import sys
import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from benchmarks.fleet_contract import (
    ASPECTS,
    KEY,
    PATH_VARIABLE,
    Check,
    OddResults,
    compare_odd_results,
    compare_task,
    compare_verifiers,
    installed_task_env,
    serve_fleet,
)
from tests.fakes.faulty_fleet import TASKS, start_jail
from tests.fakes.serving import nothing_left

from skyfleet.config.loading import load_config
from skyfleet.envs.fleet.openenv_env import import_task_env, openenv_fleet_factory
from skyfleet.envs.fleet.settings import FleetSettings
from skyfleet.envs.registry import env_factory, is_remote_env
from skyfleet.errors import ConfigError
from skyfleet.rollouts.episode import Limits, run_episode
from skyfleet.rollouts.scripted_agents import oracle_policy
from skyfleet.tasks.task import Task
from skyfleet.worlds.catalog import WORLD_NAMES, generate_world_tasks
from skyfleet.worlds.fleet_server.server import build_fleet_app

try:
    with warnings.catch_warnings(), installed_task_env():
        warnings.simplefilter("ignore")
        missing = ""
except ConfigError as error:
    missing = str(error)

needs_task_env = pytest.mark.skipif(
    bool(missing),
    reason=f"{PATH_VARIABLE} names no checkout of fleet-ai/OpenEnv with its packages: {missing}",
)
# fleet-python calls datetime.utcnow, and FleetTaskEnv an older name of the MCP client.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

LIMITS = Limits(max_turns=20, max_input_length=10**6, trajectory_timeout_seconds=20)


@pytest.fixture
def task_env() -> Iterator[None]:
    with installed_task_env():
        yield


@pytest.fixture
async def settings(task_env: None) -> AsyncIterator[FleetSettings]:
    """A server; every instance that is created on it must be deleted."""
    await start_jail()
    await asyncio.to_thread(int)  # FleetTaskEnv uses this thread, and it stays
    app = build_fleet_app(TASKS, api_key=KEY)
    async with nothing_left(), serve_fleet(OddResults(app)) as served:
        yield served
        assert app.state.instances.created == app.state.instances.deleted > 0


def _list_differences(checks: list[Check]) -> list[Check]:
    assert {check.aspect for check in checks} == set(ASPECTS)
    return [check for check in checks if not check.equal]


@needs_task_env
@pytest.mark.parametrize("world", WORLD_NAMES)
async def test_a_trajectory_is_the_same_through_task_env_and_our_client(
    world: str, settings: FleetSettings
) -> None:
    (task,) = generate_world_tasks(world, split="all", count=1, seed=11)
    assert _list_differences(await compare_task(settings, task)) == []


@needs_task_env
async def test_results_of_any_form_are_shown_alike(settings: FleetSettings) -> None:
    assert _list_differences(await compare_odd_results(settings)) == []


@needs_task_env
async def test_verifiers_of_any_form_give_the_same_grade(settings: FleetSettings) -> None:
    assert _list_differences(await compare_verifiers(settings)) == []


@needs_task_env
async def test_an_episode_cancelled_during_its_reset_leaves_no_instance(
    settings: FleetSettings,
) -> None:
    short = Limits(max_turns=5, max_input_length=10**6, trajectory_timeout_seconds=0.05)
    open_env = openenv_fleet_factory(settings)
    trajectory = await run_episode(TASKS[0], open_env, oracle_policy, short)
    assert trajectory.grade is None
    # The fixture counts instances, so at least one has to be created.
    played = await run_episode(TASKS[0], open_env, oracle_policy, LIMITS)
    assert played.grade is not None
    assert played.grade.reward == 1.0


@needs_task_env
async def test_the_environment_class_opens_task_env_with_the_runs_settings(
    settings: FleetSettings,
) -> None:
    overrides = [
        "environment.env_class=openenv_fleet",
        f"environment.skyrl_gym.fleet_task.api_key={KEY}",
    ]
    config = load_config("", overrides)
    assert is_remote_env(config, "github")
    task: Task = TASKS[0]
    trajectory = await run_episode(task, env_factory(config), oracle_policy, LIMITS)
    assert trajectory.failure is None
    assert trajectory.grade is not None
    assert trajectory.grade.reward == 1.0


@needs_task_env
async def test_a_verifier_that_would_run_code_here_is_refused_before_it_is_loaded(
    settings: FleetSettings, tmp_path: Path
) -> None:
    escaped = tmp_path / "escaped"
    code = f"open({str(escaped)!r}, 'w').close()\ndef verify(env):\n    return 1\n"
    task = TASKS[0].model_copy(update={"verifier_code": code})
    refused = await run_episode(task, openenv_fleet_factory(settings), oracle_policy, LIMITS)
    assert refused.failure is not None
    assert "allow_unconfined=true" in refused.failure.detail
    assert not escaped.exists()
    allowing = openenv_fleet_factory(settings, allow_unconfined=True)
    trusted = await run_episode(task, allowing, oracle_policy, LIMITS)
    assert trusted.failure is not None, "our own server runs it in its jail, which has no files"
    assert escaped.exists(), "fleet-python loads the source, which is why it is refused"


def test_without_task_env_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "envs.fleet_env", None)
    with pytest.raises(ConfigError, match=r"fleet-ai/OpenEnv on PYTHONPATH.*skyfleet\[fleet\]"):
        import_task_env()
