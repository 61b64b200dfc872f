"""Evaluate: tasks and a policy -> a report, and the episodes behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from skyfleet.envs.env import EnvFactory
from skyfleet.evaluation.report import EvalReport
from skyfleet.rollouts.collect import collect
from skyfleet.rollouts.conversation import Policy
from skyfleet.rollouts.limits import Limits
from skyfleet.tasks.task import Task
from skyfleet.trajectories.trajectory import Group, Trajectory


async def evaluate(
    name: str,
    tasks: Sequence[Task],
    open_env: EnvFactory,
    policy: Policy,
    limits: Limits,
    *,
    step: int,
    n_samples: int,
    max_concurrent: int,
    on_finished: Callable[[Trajectory], None] = lambda _: None,
) -> tuple[EvalReport, list[Group]]:
    groups = await collect(
        tasks,
        open_env,
        policy,
        limits,
        n_samples=n_samples,
        max_concurrent=max_concurrent,
        on_finished=on_finished,
    )
    return EvalReport.of(name, groups, step=step), groups
