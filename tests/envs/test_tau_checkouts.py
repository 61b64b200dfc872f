"""The public packages themselves: every reference passes, and what is known in advance is so."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from skyfleet.config.loading import load_config
from skyfleet.envs.env import EnvFactory
from skyfleet.envs.registry import env_factory
from skyfleet.envs.tau.sources import tau_tasks_from_source
from skyfleet.envs.tau.v2_facts import WITHOUT_REFERENCE
from skyfleet.rollouts.conversation import AgentFactory
from skyfleet.rollouts.episode import Limits, run_episode
from skyfleet.rollouts.scripted_agents import null_policy, oracle_policy
from skyfleet.tasks.task import EXPECTED_ERRORS, NULL_SUCCESS, Task
from skyfleet.trajectories.trajectory import Trajectory

LIMITS = Limits(max_turns=80, max_input_length=0, trajectory_timeout_seconds=120)
VARIABLES = {"tau_bench": "TAU_BENCH_PATH", "tau2": "TAU2_PATH"}

pytestmark = pytest.mark.exhaustive


async def play(tasks: Sequence[Task], agent: AgentFactory) -> list[Trajectory]:
    config = load_config("", [f"environment.env_class={tasks[0].env_class}"])
    open_env: EnvFactory = env_factory(config)
    played = [await run_episode(task, open_env, agent, LIMITS) for task in tasks]
    assert [one.failure for one in played] == [None] * len(tasks)
    return played


@pytest.mark.parametrize(
    ("source", "n_tasks", "n_null", "n_judged"),
    [
        ("tau_bench:retail?split=test", 115, 7, 0),
        ("tau_bench:retail?split=train", 500, 5, 0),
        ("tau_bench:retail?split=dev", 20, 1, 0),
        ("tau_bench:airline?split=test", 50, 19, 0),
        ("tau2:airline", 50, 23, 0),
        ("tau2:retail", 114, 11, 40),
        ("tau2:telecom", 114, 0, 0),
        ("tau2:mock", 10, 1, 0),
    ],
)
async def test_every_reference_passes_and_doing_nothing_passes_where_it_is_declared(
    source: str, n_tasks: int, n_null: int, n_judged: int
) -> None:
    if not os.environ.get(variable := VARIABLES[source.partition(":")[0]]):
        pytest.skip(f"needs a checkout: set {variable} (docs/tau_bench.md)")
    tasks = tau_tasks_from_source(source)
    assert len(tasks) == n_tasks
    assert sum("graded" in task.metadata for task in tasks) == n_judged
    solvable = [
        task
        for task in tasks
        if task.metadata["extra_info"].get("task_id") not in WITHOUT_REFERENCE
    ]
    assert n_tasks - len(solvable) == (2 if source == "tau2:mock" else 0)
    played = await play(solvable, oracle_policy)
    assert [one.task_key for one in played if one.reward != 1.0] == []
    errors = [sum(r.is_error for turn in one.turns for r in turn.replies) for one in played]
    assert errors == [task.metadata.get(EXPECTED_ERRORS, 0) for task in solvable]
    idle = await play(tasks, null_policy)
    assert [one.success for one in idle] == [task.metadata[NULL_SUCCESS] for task in tasks]
    assert sum(one.reward == 1.0 for one in idle) == n_null
