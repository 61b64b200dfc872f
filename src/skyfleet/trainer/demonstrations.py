"""Demonstrations: reference solutions as tokens to imitate."""

from __future__ import annotations

from collections.abc import Sequence

from skyfleet.algorithms.credit_assignment import credited
from skyfleet.algorithms.sample import Sample
from skyfleet.chat.renderer import Renderer
from skyfleet.envs.env import EnvFactory
from skyfleet.errors import TaskError
from skyfleet.rollouts.episode import Limits, collect
from skyfleet.rollouts.scripted_agents import reference_policy
from skyfleet.tasks.task import Task
from skyfleet.trajectories.trajectory import Trajectory


async def demonstrate(
    tasks: Sequence[Task], open_env: EnvFactory, renderer: Renderer, limits: Limits
) -> list[Sample]:
    """Play each task's own solution through its env and keep the tokens it took to say it.

    One whose solution is missing or does not pass is broken, and the run stops before learning from it.
    """
    groups = await collect(
        tasks, open_env, reference_policy(renderer), limits, n_samples=1, max_concurrent=64
    )
    samples: list[Sample] = []
    for task, group in zip(tasks, groups, strict=True):
        (trajectory,) = group.trajectories
        if not trajectory.success:
            raise TaskError(
                f"task {task.key}: {_wrong(task, trajectory)}; "
                "mend or leave out the task, or set trainer.warm_start.steps=0"
            )
        said = (credited(trajectory, t, 1.0) for t in trajectory.transcripts)
        samples.extend(sample for sample in said if sample.n_action_tokens)
    return samples


def _wrong(task: Task, trajectory: Trajectory) -> str:
    if not task.solution:
        return "it has no reference solution to imitate"
    if trajectory.failure:
        return f"its reference solution cannot be played: {trajectory.failure.detail}"
    return f"its reference solution does not pass ({trajectory.ending.value})"
