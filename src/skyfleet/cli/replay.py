"""`skyfleet replay`: play a recorded episode again, or go on from one of its turns with another."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyfleet.cli.agents import Agent, CheckpointPath, policy_of
from skyfleet.cli.run_tasks import RunPath, tasks_of
from skyfleet.errors import ConfigError, TaskError

if TYPE_CHECKING:
    from skyfleet.analysis.run_folder import RunFolder
    from skyfleet.tasks.task import Task
    from skyfleet.trajectories.trajectory import Trajectory


def replay_command(
    run: RunPath,
    episode_id: Annotated[str, typer.Argument(help="Such as eval/unseen_tasks/40/3.")],
    fork_at: Annotated[
        int | None, typer.Option(help="Replay the turns before this one, then hand over.")
    ] = None,
    agent: Agent = "policy",
    checkpoint: CheckpointPath = None,
) -> None:
    """Replay an episode in its world; exit code 1 where anything is different."""
    from skyfleet.analysis.run_folder import open_run
    from skyfleet.trajectories.archive import load
    from skyfleet.trajectories.index import find_entry

    if fork_at is None and (checkpoint is not None or agent != "policy"):
        raise ConfigError("--agent and --checkpoint say who goes on: give --fork-at, from 0 up")
    folder = open_run(run)
    entry = find_entry(folder.trajectories, episode_id)
    tasks = tasks_of(folder, [entry])
    if entry.task_key not in tasks:
        raise TaskError(
            f"{entry.task_key} is not among the tasks that {run}/config.yaml names; "
            "give them back the contents they had"
        )
    trajectory, task = load(entry), tasks[entry.task_key]
    if fork_at is not None:
        asyncio.run(_fork(folder, trajectory, task, fork_at, agent, checkpoint))
    elif difference := asyncio.run(_difference(folder, trajectory, task)):
        print(f"{episode_id} is different: {difference}")
        raise typer.Exit(1)
    else:
        print(f"{episode_id} is the same: {len(trajectory.turns)} turns, {_graded(trajectory)}")


async def _difference(folder: RunFolder, trajectory: Trajectory, task: Task) -> str | None:
    from skyfleet.analysis.replay import replay
    from skyfleet.envs.registry import env_factory

    return (await replay(trajectory, task, env_factory(folder.config))).difference


async def _fork(
    folder: RunFolder,
    trajectory: Trajectory,
    task: Task,
    turn: int,
    agent: str,
    checkpoint: Path | None,
) -> None:
    from skyfleet.analysis.before_after import aligned
    from skyfleet.cli.diff import print_rows
    from skyfleet.envs.registry import env_factory
    from skyfleet.rollouts.episode import run_episode
    from skyfleet.rollouts.fork import forked_policy, same_tokens
    from skyfleet.trainer.limits import limits_of

    policy = await policy_of(folder.config, agent, checkpoint)
    forked = await run_episode(
        task,
        env_factory(folder.config),
        forked_policy(trajectory, policy, turn=turn),
        limits_of(folder.config),
        sample=trajectory.sample,
    )
    print_rows(aligned(trajectory, forked), ("recorded", "forked"))
    print(f"recorded: {_graded(trajectory)}; forked at turn {turn}: {_graded(forked)}")
    if forked.transcripts and not same_tokens(trajectory, forked, turn=turn):
        print("The fork went on from words: its tokens for this episode are not the recorded ones.")
    if forked.failure:
        print(f"{forked.failure.kind}: {forked.failure.detail}")


def _graded(trajectory: Trajectory) -> str:
    grade = "unknown" if trajectory.reward is None else f"{trajectory.reward:g}"
    return f"{trajectory.ending}, grade {grade}"
