"""Collect: many episodes at once, bounded, each task's attempts back as one group."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from skyfleet.envs.env import EnvFactory
from skyfleet.rollouts.conversation import Policy
from skyfleet.rollouts.episode import run_episode
from skyfleet.rollouts.limits import Limits
from skyfleet.tasks.task import Task
from skyfleet.trajectories.trajectory import Group, Trajectory


async def collect(
    tasks: Sequence[Task],
    open_env: EnvFactory,
    policy: Policy,
    limits: Limits,
    *,
    n_samples: int,
    max_concurrent: int,
    on_finished: Callable[[Trajectory], None] = lambda _: None,
) -> list[Group]:
    """`n_samples` attempts at each task, in the order asked. A failed attempt is one of them."""
    gate = asyncio.Semaphore(max_concurrent)

    async def gated(task: Task, sample: int) -> Trajectory:
        async with gate:
            trajectory = await run_episode(task, open_env, policy, limits, sample=sample)
        on_finished(trajectory)
        return trajectory

    async with asyncio.TaskGroup() as episodes:
        running = [
            [episodes.create_task(gated(task, sample)) for sample in range(n_samples)]
            for task in tasks
        ]
    return [
        Group(
            task_key=task.key,
            env_key=task.env_key,
            trajectories=tuple(attempt.result() for attempt in attempts),
        )
        for task, attempts in zip(tasks, running, strict=True)
    ]
