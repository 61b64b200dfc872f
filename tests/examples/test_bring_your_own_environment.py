"""The environment on the docs page is short, loads by name, and its solution passes."""

from __future__ import annotations

import sys

import pytest
from tests.fakes.page_example import block_on, module_on, task_on

from skyfleet.config.loading import load_config
from skyfleet.envs.registry import env_factory
from skyfleet.rollouts.episode import Limits, run_episode
from skyfleet.rollouts.scripted_agents import null_policy, oracle_policy
from skyfleet.trajectories.trajectory import Ending

PAGE = "bring_your_own_environment.md"
LIMITS = Limits(max_turns=4, max_input_length=512, trajectory_timeout_seconds=5)


def test_the_example_has_thirty_lines_of_code() -> None:
    assert sum(bool(line.strip()) for line in block_on(PAGE, "python").splitlines()) == 30


async def test_its_task_is_solved_by_its_solution_and_not_by_doing_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "button", module_on(PAGE))
    task = task_on(PAGE)
    open_env = env_factory(load_config("", ["environment.env_class=button:open_button"]))
    solved = await run_episode(task, open_env, oracle_policy, LIMITS)
    idle = await run_episode(task, open_env, null_policy, LIMITS)
    assert (solved.ending, solved.reward) == (Ending.DONE, 1.0)
    assert (idle.ending, idle.reward) == (Ending.DONE, 0.0)
