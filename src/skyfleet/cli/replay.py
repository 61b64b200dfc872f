"""`skyfleet replay`: repeat a recorded episode, or fork it at one of its turns."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyfleet.analysis.formatting import format_count
from skyfleet.cli.agents import Agent, CheckpointPath, select_agent
from skyfleet.cli.run_tasks import RunPath, load_episode_tasks
from skyfleet.errors import ConfigError, TaskError
from skyfleet.terminal import print, sanitize

if TYPE_CHECKING:
    from skyfleet.analysis.run_folder import RunFolder
    from skyfleet.tasks.task import Task
    from skyfleet.trajectories.trajectory import Trajectory


def replay_command(
    run: RunPath,
    episode_id: Annotated[str, typer.Argument(help="Such as eval/unseen_tasks/60/3.")],
    fork_at: Annotated[
        int | None,
        typer.Option(
            min=1, help="Replay the turns before this one (from 1), then continue with the agent."
        ),
    ] = None,
    agent: Agent = "policy",
    checkpoint: CheckpointPath = None,
) -> None:
    """Replay an episode in its environment; exit code 1 if anything differs."""
    from skyfleet.analysis.run_folder import open_run
    from skyfleet.envs.event_loop import run_loop
    from skyfleet.trajectories.archive import load
    from skyfleet.trajectories.index import find_entry

    if fork_at is None and (checkpoint is not None or agent != "policy"):
        raise ConfigError(
            "--agent and --checkpoint need --fork-at, the turn (from 1) at which the agent takes over"
        )
    folder = open_run(run)
    entry = find_entry(folder.trajectories, episode_id)
    tasks = load_episode_tasks(folder, [entry])
    if entry.task_key not in tasks:
        raise TaskError(
            f"{entry.task_key} is not among the tasks of {run}/config.yaml; "
            "restore the task files to their content at training time"
        )
    trajectory, task = load(entry), tasks[entry.task_key]
    if fork_at is not None:
        weights, description = _find_agent(folder, agent, checkpoint)
        print(f"from turn {fork_at} on: {sanitize(description)}")
        run_loop(_fork(folder, trajectory, task, fork_at - 1, agent, weights))
    elif difference := run_loop(_difference(folder, trajectory, task)):
        print(f"{episode_id} is different: {sanitize(difference)}")
        raise typer.Exit(1)
    else:
        turns = format_count(len(trajectory.turns), "turn")
        print(f"{episode_id} is the same: {turns}, {_describe_grade(trajectory)}")


def _find_agent(
    folder: RunFolder, agent: str, checkpoint: str | None
) -> tuple[Path | str | None, str]:
    """The checkpoint that continues, by default this run's newest, and a description."""
    from skyfleet.checkpoints.checkpoint import read_checkpoint
    from skyfleet.checkpoints.resume import find_checkpoint

    if agent != "policy":
        return checkpoint, f"the {agent} agent"
    if checkpoint is not None and not (Path(checkpoint) / "policy").exists():
        return checkpoint, f"the model in {checkpoint}"  # also at an address
    root = folder.path / "checkpoints"
    found = read_checkpoint(Path(checkpoint)) if checkpoint else find_checkpoint(root, "latest")
    if found is None:
        # Not the configured path: it may hold another run by now.
        raise ConfigError(f"{root} holds no checkpoint; pass --checkpoint or --agent oracle")
    return found.folder, f"the policy of step {found.step}, {found.folder}"


async def _difference(folder: RunFolder, trajectory: Trajectory, task: Task) -> str | None:
    from skyfleet.analysis.replay import replay
    from skyfleet.envs.registry import env_factory

    return (await replay(trajectory, task, env_factory(folder.config))).difference


async def _fork(
    folder: RunFolder,
    trajectory: Trajectory,
    task: Task,
    turn: int,  # from 0
    agent: str,
    checkpoint: Path | str | None,
) -> None:
    from skyfleet.analysis.before_after import align_turns
    from skyfleet.api.agents import open_agent
    from skyfleet.api.envs import ResolvedEnv
    from skyfleet.cli.diff import print_rows
    from skyfleet.rollouts.episode import run_episode
    from skyfleet.rollouts.fork import forked_policy, same_tokens
    from skyfleet.trainer.limits import build_limits

    selected = select_agent(folder.config, agent, checkpoint)
    config = folder.config if isinstance(selected, str) else None
    context = open_agent(selected, ResolvedEnv(), [task], None, config, {}, where="skyfleet replay")
    async with context as opened:
        forked = await run_episode(
            task,
            opened.open_env,
            forked_policy(trajectory, opened.agent, turn=turn),
            build_limits(folder.config),
            sample=trajectory.sample,
        )
    if not isinstance(selected, str):
        await selected.aclose()
    print_rows(align_turns(trajectory, forked), ("recorded", "forked"))
    print(
        f"recorded: {_describe_grade(trajectory)}; forked at turn {turn + 1}: {_describe_grade(forked)}"
    )
    if forked.transcripts and not same_tokens(trajectory, forked, turn=turn):
        print("The fork re-tokenized the messages: its tokens differ from the recorded ones.")
    if forked.failure:
        print(sanitize(f"{forked.failure.kind}: {forked.failure.detail}"))


def _describe_grade(trajectory: Trajectory) -> str:
    grade = "unknown" if trajectory.reward is None else f"{trajectory.reward:g}"
    return f"{trajectory.ending}, grade {grade}"
