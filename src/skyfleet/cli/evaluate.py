"""`skyfleet evaluate`: score a policy on a configuration's evaluation sets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyfleet.cli.agents import Agent, CheckpointPath, endpoint_policy, policy_of, step_of
from skyfleet.cli.arguments import DryRun, Words, config_from, show_plan
from skyfleet.errors import ConfigError

if TYPE_CHECKING:
    from skyfleet.config.root import RunConfig
    from skyfleet.evaluation.report import EvalReport
    from skyfleet.rollouts.conversation import Policy
    from skyfleet.trajectories.trajectory import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    agent: str
    checkpoint: Path | None
    endpoint: str | None
    model: str | None
    pass_threshold: float
    baselines: bool

    @property
    def who(self) -> str:
        return (
            f"{self.model} at {self.endpoint}"
            if self.endpoint
            else str(self.checkpoint or self.agent)
        )


def evaluate_command(
    words: Words = None,
    agent: Agent = "policy",
    checkpoint: CheckpointPath = None,
    endpoint: Annotated[
        str | None,
        typer.Option(help="URL of a model, up to /chat/completions; key in OPENAI_API_KEY."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Its name there.")] = None,
    only: Annotated[str | None, typer.Option("--set", help="One evaluation set.")] = None,
    pass_threshold: Annotated[float, typer.Option(help="The reward of a pass.")] = 1.0,
    baselines: Annotated[
        bool, typer.Option("--baselines", help="Measure them behind remote doors, too.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Folder for the reports.")] = None,
    dry_run: DryRun = False,
) -> None:
    """Score a checkpoint, a model, an endpoint, or a scripted agent (oracle, null, random)."""
    config = config_from(words)
    _check_who(agent, checkpoint, endpoint, model)
    sets = config.data.eval_sets
    if only is not None and only not in sets:
        raise ConfigError(f"--set {only}: data.val_data names {sorted(sets) or 'no set'}")
    chosen = {name: sources for name, sources in sets.items() if only in (None, name)}
    if not chosen:
        raise ConfigError("data.val_data is empty: name the sets to evaluate on")
    asked = _Asked(
        agent=agent,
        checkpoint=checkpoint,
        endpoint=endpoint,
        model=model,
        pass_threshold=pass_threshold,
        baselines=baselines,
    )
    if dry_run:
        show_plan(config, [f"would score {asked.who} on {', '.join(chosen)}"])
        return
    _show(asyncio.run(_evaluate(config, chosen, asked)), output)


def _check_who(
    agent: str, checkpoint: Path | None, endpoint: str | None, model: str | None
) -> None:
    if (endpoint is None) != (model is None):
        raise ConfigError("--endpoint and --model go together; give both or neither")
    if endpoint is not None and (agent != "policy" or checkpoint is not None):
        raise ConfigError(
            f"--endpoint {endpoint} plays instead of --agent and --checkpoint; leave them out"
        )


def _show(evaluated: Sequence[tuple[EvalReport, list[Group]]], output: Path | None) -> None:
    from skyfleet.evaluation.baselines import baseline_faults
    from skyfleet.evaluation.table import score_table
    from skyfleet.storage.local import write_atomically

    reports = [report for report, _ in evaluated]
    print(score_table(reports), end="")
    sentences = [
        f"{report.name}: {sentence}"
        for report, groups in evaluated
        for sentence in (*_ungraded(groups), *baseline_faults(report.baselines))
    ]
    if sentences:
        print("", *sentences, sep="\n")
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        for report in reports:
            write_atomically(output / f"{report.name}.json", report.to_json())


def _ungraded(groups: Sequence[Group]) -> list[str]:
    attempts = [attempt for group in groups for attempt in group.trajectories]
    unknown = [attempt for attempt in attempts if attempt.grade is None]
    if not unknown:
        return []
    failure = unknown[0].failure
    cause = f"{failure.kind}: {failure.detail}" if failure else "the environment gave no grade"
    return [f"{len(unknown)} of {len(attempts)} attempts have no grade; the first: {cause}"]


async def _evaluate(
    config: RunConfig, sets: dict[str, list[str]], asked: _Asked
) -> list[tuple[EvalReport, list[Group]]]:
    from skyfleet.envs.registry import env_factory, is_elsewhere
    from skyfleet.evaluation.baselines import measure_baselines
    from skyfleet.evaluation.evaluate import evaluate
    from skyfleet.tracking.console import ConsoleTracker
    from skyfleet.trainer.limits import limits_of
    from skyfleet.trainer.sources import load_sources

    open_env, limits = env_factory(config), limits_of(config)
    most, n_samples = config.generator.max_num_seqs, config.generator.eval_n_samples_per_prompt
    trained_envs = _trained_envs(config)
    console = ConsoleTracker()
    evaluated = []
    async with _playing(config, asked) as (policy, step):
        for name, sources in sets.items():
            tasks = load_sources(sources, key=f"data.val_data.{name}")
            baselines = await measure_baselines(
                [
                    task
                    for task in tasks
                    if asked.baselines or not is_elsewhere(config, task.env_key)
                ],
                open_env,
                limits,
                max_concurrent=most,
                pass_threshold=asked.pass_threshold,
            )
            with console.progress(name, len(tasks) * n_samples) as advance:
                scored = await evaluate(
                    name,
                    tasks,
                    open_env,
                    policy,
                    limits,
                    step=step,
                    n_samples=n_samples,
                    max_concurrent=most,
                    trained_envs=trained_envs,
                    baselines=baselines,
                    pass_threshold=asked.pass_threshold,
                    on_finished=lambda _: advance(),
                )
            evaluated.append(scored)
    console.close()
    return evaluated


@asynccontextmanager
async def _playing(config: RunConfig, asked: _Asked) -> AsyncIterator[tuple[Policy, int]]:
    """The policy, and the step it was trained to."""
    if asked.endpoint is not None and asked.model is not None:
        async with endpoint_policy(config, asked.endpoint, asked.model) as policy:
            yield policy, 0
        return
    policy = await policy_of(config, asked.agent, asked.checkpoint)
    yield policy, step_of(config, asked.agent, asked.checkpoint)


def _trained_envs(config: RunConfig) -> frozenset[str] | None:
    """None where nothing says what is trained on."""
    from skyfleet.envs.worlds.catalog import add_world
    from skyfleet.trainer.sources import load_sources

    data = config.data
    trained: set[str] = set()
    for source in data.train_data:
        address = source.partition("?")[0]
        if address.startswith("world:"):
            # Its name is enough: drawing thousands of tasks takes seconds.
            world = address.removeprefix("world:")
            trained.add(add_world(world, key="data.train_data").name if ":" in world else world)
        else:
            trained |= {task.env_key for task in load_sources([source], key="data.train_data")}
    if data.env_filter:
        trained &= set(data.env_filter)
    return frozenset(trained) if data.train_data else None
