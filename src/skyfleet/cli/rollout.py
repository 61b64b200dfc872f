"""`skyfleet rollout`: run one episode and print it turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from skyfleet.cli.agents import Agent, CheckpointPath, describe_agent, plan_memory, select_agent
from skyfleet.cli.arguments import ConfigArgs, DryRun, config_from, show_plan
from skyfleet.errors import ConfigError, TaskError
from skyfleet.terminal import sanitize, sanitize_lines

if TYPE_CHECKING:
    from rich.console import Console

    from skyfleet.api.policy import Policy
    from skyfleet.chat.message import Message
    from skyfleet.config.root import RunConfig
    from skyfleet.tasks.task import Task

_COLOURS = {"system": "dim", "user": "cyan", "assistant": "bold green", "tool": "yellow"}


def rollout_command(
    source: Annotated[str, typer.Argument(help="A task file, or world:github?count=20.")],
    config_args: ConfigArgs = None,
    key: Annotated[str | None, typer.Option(help="Which task; by default the first.")] = None,
    agent: Agent = "policy",
    checkpoint: CheckpointPath = None,
    dry_run: DryRun = False,
) -> None:
    """Run one episode and print it turn by turn."""
    from rich.console import Console

    from skyfleet.envs.event_loop import run_loop
    from skyfleet.envs.verifiers.confinement import check_verifiers
    from skyfleet.trainer.tasks import load_sources

    if not config_args and agent == "policy" and checkpoint is None:
        raise ConfigError("no policy: pass a config file, --checkpoint DIR, or --agent oracle")
    config = config_from(config_args)
    selected = select_agent(config, agent, checkpoint)
    tasks = [t for t in load_sources([source], key="SOURCE") if key in (None, t.key)]
    if not tasks:
        raise TaskError(f"{source} has no task {key!r}; `skyfleet tasks list` shows its keys")
    check_verifiers(config, tasks[:1])
    if dry_run:
        plan = [f"would run {tasks[0].key} with {checkpoint or agent}", *plan_memory(selected)]
        show_plan(config, plan)
        return
    run_loop(_rollout(config, tasks[0], selected, Console(highlight=False)))


async def _rollout(config: RunConfig, task: Task, agent: Policy | str, console: Console) -> None:
    from skyfleet.api.evaluation import rollout_async

    described = sanitize(f"{describe_agent(agent)}: {task.key}")
    console.print(described, style="bold", markup=False, soft_wrap=True)
    try:
        trajectory = await rollout_async(
            agent,
            task=task,
            on_messages=lambda messages: _show(console, messages),
            config=config if isinstance(agent, str) else None,
        )
    finally:
        if not isinstance(agent, str):
            await agent.aclose()
    grade = trajectory.grade
    verdict = "unknown" if grade is None else f"{grade.reward:g}"
    console.print(
        f"\n{sanitize(task.key)}: {trajectory.ending}, {len(trajectory.turns)} turns, "
        f"{trajectory.seconds:.2f} s, grade {verdict}",
        style="bold",
        markup=False,
    )
    if trajectory.failure:
        failure = f"{trajectory.failure.kind}: {trajectory.failure.detail}"
        console.print(sanitize_lines(failure), markup=False)


def _show(console: Console, messages: Sequence[Message]) -> None:
    for message in messages:
        lines = [message.text] if message.text else []
        for call in message.tool_calls:
            mark = f" (repaired: {call.repair})" if call.repair else ""
            lines.append(f"-> {call.name}({dict(call.arguments)}){mark}")
        lines += [f"?? {text}" for text in message.malformed_calls]
        colour = "red" if message.is_error else _COLOURS[message.role]
        console.print(f"[{message.role}]", style="dim", markup=False)
        console.print(sanitize_lines("\n".join(lines)), style=colour, markup=False)
