"""`skyfleet evaluate`: score a policy on a configuration's evaluation sets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyfleet.cli.agents import (
    Agent,
    CheckpointPath,
    build_agent,
    check_agent,
    check_endpoint,
    check_weights,
    endpoint_policy,
    measured_policy,
    model_named,
    open_run_policy_client,
)
from skyfleet.cli.arguments import ConfigArgs, DryRun, config_from, show_plan
from skyfleet.cli.interrupting import cancelled_by_ctrl_c, exit_interrupted
from skyfleet.cli.trained_envs import trained_envs_of
from skyfleet.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from skyfleet.config.root import RunConfig
    from skyfleet.evaluation.agent_info import AgentInfo
    from skyfleet.evaluation.report import EvalReport
    from skyfleet.rollouts.conversation import AgentFactory
    from skyfleet.trajectories.trajectory import Group, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    agent: str
    checkpoint: Path | None
    endpoint: str | None
    model: str | None
    pass_threshold: float
    baselines: bool
    output: Path | None

    @property
    def who(self) -> str:
        return (
            f"{self.model} at {self.endpoint}"
            if self.endpoint
            else str(self.checkpoint or self.agent)
        )


def evaluate_command(
    words: ConfigArgs = None,
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
    output: Annotated[
        Path | None, typer.Option(help="Folder for reports and episodes, as of a run.")
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Score a checkpoint, a model, an endpoint, or a scripted agent (oracle, null, random)."""
    from skyfleet.evaluation.report import check_output

    config = config_from(words)
    asked = _Asked(
        agent=agent,
        checkpoint=checkpoint,
        endpoint=endpoint,
        model=model,
        pass_threshold=pass_threshold,
        baselines=baselines,
        output=output,
    )
    _check(config, asked)
    sets = config.data.eval_sets
    if only is not None and only not in sets:
        raise ConfigError(f"--set {only}: data.val_data names {sorted(sets) or 'no set'}")
    chosen = {name: sources for name, sources in sets.items() if only in (None, name)}
    if not chosen:
        raise ConfigError("data.val_data is empty: name the sets to evaluate on")
    if output is not None:
        check_output(output)
    if dry_run:
        if endpoint is None:
            check_weights(config, agent, checkpoint)
        show_plan(config, [f"would score {asked.who} on {', '.join(chosen)}"])
        return
    try:
        asyncio.run(cancelled_by_ctrl_c(_evaluate(config, chosen, asked)))
    except KeyboardInterrupt:
        exit_interrupted(partial(_farewell, output))


def _farewell(output: Path | None) -> str:
    kept = output is not None and (output / "trajectories").exists()
    return f"Interrupted{f'; what was played is in {output}' if kept else ''}."


def _check(config: RunConfig, asked: _Asked) -> None:
    if (asked.endpoint is None) != (asked.model is None):
        raise ConfigError("--endpoint and --model go together; give both or neither")
    if asked.endpoint is not None and (asked.agent != "policy" or asked.checkpoint is not None):
        raise ConfigError(
            f"--endpoint {asked.endpoint} plays instead of --agent and --checkpoint; leave them out"
        )
    if asked.endpoint is None:
        check_agent(config, asked.agent, asked.checkpoint)
    else:
        check_endpoint(config)
    if not isfinite(asked.pass_threshold):
        raise ConfigError(f"--pass-threshold {asked.pass_threshold}: give a number, such as 0.5")


def _remarks(report: EvalReport, groups: Sequence[Group]) -> Iterator[str]:
    from skyfleet.evaluation.baselines import baseline_faults
    from skyfleet.trajectories.trajectory import describe_ungraded

    if unknown := describe_ungraded(groups):
        yield f"{report.name}: {unknown}"
    for sentence in baseline_faults(report.baselines):
        yield f"{report.name}: {sentence}"


async def _evaluate(config: RunConfig, sets: dict[str, list[str]], asked: _Asked) -> None:
    """Each set is kept as it ends; the table comes when all have."""
    from skyfleet.envs.registry import env_factory, is_elsewhere
    from skyfleet.evaluation.baselines import measure_baselines
    from skyfleet.evaluation.evaluate import evaluate
    from skyfleet.evaluation.report import save_report
    from skyfleet.evaluation.table import score_table
    from skyfleet.tracking.console import ConsoleTracker
    from skyfleet.trainer.limits import build_limits
    from skyfleet.trainer.tasks import load_sources

    open_env, limits = env_factory(config), build_limits(config)
    most, n_samples = config.generator.max_num_seqs, config.generator.eval_n_samples_per_prompt
    trained_envs, remarks = trained_envs_of(config)
    console = ConsoleTracker()
    reports = []
    async with _playing(config, asked) as (policy, player, step):
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
            with (
                console.progress(name, len(tasks) * n_samples) as advance,
                _keeping(config, asked.output, player, name, step, advance) as keep,
            ):
                report, groups = await evaluate(
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
                    played_by=player,
                    on_finished=keep,
                )
            if asked.output is not None:
                save_report(asked.output, report)
            reports.append(report)
            remarks += _remarks(report, groups)
    console.close()
    if played := player.checkpoint or player.endpoint:
        print(f"{played} played.\n")
    print(score_table(reports), end="")
    if remarks:
        print("", *remarks, sep="\n")
    if not any(report.overall.n_attempts for report in reports):
        raise EngineError("no attempt could be graded: nothing was measured")


@contextmanager
def _keeping(
    config: RunConfig,
    output: Path | None,
    player: AgentInfo,
    name: str,
    step: int,
    advance: Callable[[], None],
) -> Iterator[Callable[[Trajectory], None]]:
    """Told of each episode as it ends, so that an interruption loses none."""
    from skyfleet.evaluation.report import open_episodes, prepare_output

    if output is None:
        yield lambda _: advance()
        return
    prepare_output(output, config, player)
    with open_episodes(output, name, step) as archive:

        def keep(ended: Trajectory) -> None:
            archive.add(ended)
            advance()

        yield keep


@asynccontextmanager
async def _playing(
    config: RunConfig, asked: _Asked
) -> AsyncIterator[tuple[AgentFactory, AgentInfo, int]]:
    """The policy, who it is, and the step it was trained to."""
    from skyfleet.evaluation.agent_info import AgentInfo

    generator = config.generator
    temperature = generator.eval_sampling_params.temperature
    if asked.endpoint is not None and asked.model is not None:
        player = AgentInfo(
            model=asked.model,
            endpoint=asked.endpoint,
            temperature=temperature,
            max_turns=generator.max_turns,
        )
        async with endpoint_policy(config, asked.endpoint, asked.model) as policy:
            yield policy, player, 0
        return
    if asked.agent != "policy":
        player = AgentInfo(agent=asked.agent, max_turns=generator.max_turns)
        async with build_agent(config, asked.agent, asked.checkpoint) as (policy, _):
            yield policy, player, 0
        return
    async with open_run_policy_client(config, asked.checkpoint) as (policy_client, folder):
        step = policy_client.engine.policy_version
        player = AgentInfo(
            model=model_named(config, policy_client),
            endpoint=", ".join(generator.remote_inference_engine_urls) or None,
            checkpoint=str(folder) if folder else None,
            step=step if step and generator.is_remote else None,
            temperature=temperature,
            max_turns=generator.max_turns,
        )
        yield measured_policy(config, policy_client), player, step
