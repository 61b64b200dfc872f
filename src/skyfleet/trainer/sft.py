"""Warm start: supervised fine-tuning on reference solutions before reinforcement learning."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from random import Random

from skyfleet.algorithms.credit_assignment import make_sample
from skyfleet.algorithms.sample import Sample
from skyfleet.chat.renderer import Renderer
from skyfleet.envs.env import EnvFactory
from skyfleet.errors import TaskError
from skyfleet.rollouts.episode import Limits, collect
from skyfleet.rollouts.scripted_agents import reference_policy
from skyfleet.tasks.task import Task
from skyfleet.trainer.run import Run
from skyfleet.trajectories.trajectory import Trajectory

logger = logging.getLogger(__name__)

SOLUTION_TRIES = 3
"""For a reference solution whose environment fails."""
MAX_FAILED_SHARE = 0.5
"""If more reference solutions fail, the environment is broken, and the run does not start."""


async def warm_start(run: Run) -> None:
    total, done = run.schedule.warm_start_steps, run.state.warm_start_step
    if done >= total:
        return
    warm = run.warm_start
    async with run.inference.offload():
        with run.console.progress("warm start", total, done=done) as advance:
            while run.state.warm_start_step < total:
                # A pending cancellation takes effect here, before a step, so no step is half done.
                await asyncio.sleep(0)
                step = run.state.warm_start_step
                batch = sft_batch(warm.demonstrations, warm.batch_size, step, seed=warm.seed)
                report = await run.learner.sft_step(batch)
                run.state.warm_start_step = step + 1
                run.resume_point.policy_version = report.policy_version
                advance()
        run.log.add({f"warm_start/{name}": value for name, value in report.metrics.items()})
        run.mark_resume_point()
        await asyncio.sleep(0)
        await run.inference.push(run.learner)


def sft_batch(samples: Sequence[Sample], size: int, step: int, *, seed: int) -> list[Sample]:
    """The demonstrations of one step: each once per epoch, shuffled by epoch."""
    size = min(size, len(samples))
    epoch, index = divmod(step, len(samples) // size)
    order = list(range(len(samples)))
    Random(f"{seed}/{epoch}").shuffle(order)
    return [samples[i] for i in order[index * size : (index + 1) * size]]


async def collect_demonstrations(
    tasks: Sequence[Task], open_env: EnvFactory, renderer: Renderer, limits: Limits
) -> list[Sample]:
    """Roll out every task's reference solution and return its tokens as samples.

    A solution that is missing or does not pass is a TaskError: the task is broken. A failed
    environment says nothing about the task, which is tried again and then left out.
    """
    attempts = await _roll_out_solutions(tasks, open_env, renderer, limits)
    failed = [task for task in tasks if task.solution and attempts[task.key].failure]
    if len(failed) <= MAX_FAILED_SHARE * len(tasks):
        for task in failed:
            reason = _describe_failure(task, attempts.pop(task.key))
            logger.warning("task %s is not in the warm start: %s", task.key, reason)
    samples: list[Sample] = []
    for task in tasks:
        if (trajectory := attempts.get(task.key)) is None:
            continue
        if not trajectory.success:
            raise TaskError(
                f"task {task.key}: {_describe_failure(task, trajectory)}; "
                "fix or remove the task, or set trainer.warm_start.steps=0"
            )
        made = (make_sample(trajectory, t, 1.0) for t in trajectory.transcripts)
        samples.extend(sample for sample in made if sample.n_action_tokens)
    return samples


async def _roll_out_solutions(
    tasks: Sequence[Task], open_env: EnvFactory, renderer: Renderer, limits: Limits
) -> dict[str, Trajectory]:
    """One attempt by task key; those whose environment failed are repeated."""
    attempts: dict[str, Trajectory] = {}
    for _ in range(SOLUTION_TRIES):
        open_tasks = [
            task for task in tasks if task.key not in attempts or attempts[task.key].failure
        ]
        groups = await collect(
            open_tasks, open_env, reference_policy(renderer), limits, n_samples=1, max_concurrent=64
        )
        attempts |= {group.task_key: group.trajectories[0] for group in groups}
    return attempts


def _describe_failure(task: Task, trajectory: Trajectory) -> str:
    if not task.solution:
        return "it has no reference solution"
    if trajectory.failure:
        return f"its reference solution failed: {trajectory.failure.detail}"
    return f"its reference solution does not pass ({trajectory.ending.value})"
