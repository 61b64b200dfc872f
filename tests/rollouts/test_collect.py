"""Many episodes at once: bounded concurrency, results in task order."""

from __future__ import annotations

import asyncio

from tests.fakes.counter_env import CounterEnv
from tests.fakes.scripted_engine import ScriptedEngine, token_agent

from skyfleet.envs.env import Observation
from skyfleet.rollouts.episode import Limits, collect
from skyfleet.tasks.task import Task
from skyfleet.trajectories.trajectory import Trajectory

LIMITS = Limits(max_turns=2, max_input_length=100, trajectory_timeout_seconds=5)
TASKS = [Task(key=f"t{i}", env_key=f"env{i % 2}", prompt="reach 3") for i in range(4)]


async def test_groups_come_back_in_the_order_asked_with_all_their_attempts() -> None:
    class Slow(CounterEnv):
        def __init__(self, seconds: float) -> None:
            super().__init__()
            self._seconds = seconds

        async def reset(self) -> Observation:
            await asyncio.sleep(self._seconds)
            return await super().reset()

    async def open_env(task: Task) -> Slow:
        return Slow({"t0": 0.03, "t1": 0.0, "t2": 0.02, "t3": 0.01}[task.key])

    finished: list[Trajectory] = []
    groups = await collect(
        TASKS,
        open_env,
        token_agent(ScriptedEngine("done")),
        LIMITS,
        n_samples=2,
        max_concurrent=8,
        on_finished=finished.append,
    )
    assert [(g.task_key, g.env_key) for g in groups] == [
        ("t0", "env0"),
        ("t1", "env1"),
        ("t2", "env0"),
        ("t3", "env1"),
    ]
    assert [[t.sample for t in g.trajectories] for g in groups] == [[0, 1]] * 4
    assert [t.task_key for t in finished] == ["t1", "t1", "t3", "t3", "t2", "t2", "t0", "t0"]


async def test_no_more_episodes_run_at_once_than_allowed() -> None:
    open_now = most = 0

    class Counted(CounterEnv):
        async def close(self) -> None:
            nonlocal open_now
            open_now -= 1

    async def open_env(task: Task) -> Counted:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(0.001)
        return Counted()

    policy = token_agent(ScriptedEngine("done"))
    await collect(TASKS, open_env, policy, LIMITS, n_samples=3, max_concurrent=4)
    assert (most, open_now) == (4, 0)
