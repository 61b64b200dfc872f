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
    evaluation_agent,
    find_model_name,
    open_endpoint_agent,
    open_run_policy_client,
)
from skyfleet.cli.arguments import ConfigArgs, DryRun, config_from, show_plan
from skyfleet.cli.interrupting import cancel_on_ctrl_c, exit_interrupted
from skyfleet.cli.run_tasks import find_trained_envs
from skyfleet.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from skyfleet.config.root import RunConfig
    from skyfleet.evaluation.agent_info import AgentInfo
    from skyfleet.evaluation.report import EvalReport
    from skyfleet.rollouts.conversation import AgentFactory
    from skyfleet.trajectories.trajectory import Group, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
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
    config_args: ConfigArgs = None,
    agent: Agent = "policy",
    checkpoint: CheckpointPath = None,
    endpoint: Annotated[
        str | None,
        typer.Option(help="URL of a model, up to /chat/completions; key in OPENAI_API_KEY."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Its name there.")] = None,
    only: Annotated[str | None, typer.Option("--eval-set", help="One evaluation set.")] = None,
    pass_threshold: Annotated[float, typer.Option(help="The reward that counts as a pass.")] = 1.0,
    baselines: Annotated[
        bool, typer.Option("--baselines", help="Measure baselines in remote environments too.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="Folder for reports and trajectories, like a run folder.")
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Score a checkpoint, a model, an endpoint, or a scripted agent (oracle, null, random)."""
    from skyfleet.evaluation.report import check_output

    config = config_from(config_args)
    options = _Options(
        agent=agent,
        checkpoint=checkpoint,
        endpoint=endpoint,
        model=model,
        pass_threshold=pass_threshold,
        baselines=baselines,
        output=output,
    )
    _check(config, options)
    sets = config.data.eval_sets
    if only is not None and only not in sets:
        raise ConfigError(f"--eval-set {only}: data.val_data has {sorted(sets) or 'no set'}")
    chosen = {name: sources for name, sources in sets.items() if only in (None, name)}
    if not chosen:
        raise ConfigError("data.val_data is empty; set the evaluation sets")
    if output is not None:
        check_output(output)
    if dry_run:
        if endpoint is None:
            check_weights(config, agent, checkpoint)
        show_plan(config, [f"would score {options.who} on {', '.join(chosen)}"])
        return
    try:
        asyncio.run(cancel_on_ctrl_c(_evaluate(config, chosen, options)))
    except KeyboardInterrupt:
        exit_interrupted(partial(_describe_interruption, output))


def _describe_interruption(output: Path | None) -> str:
    kept = output is not None and (output / "trajectories").exists()
    return f"Interrupted{f'; finished episodes are in {output}' if kept else ''}."


def _check(config: RunConfig, options: _Options) -> None:
    if (options.endpoint is None) != (options.model is None):
        raise ConfigError("--endpoint and --model belong together; pass both or neither")
    if options.endpoint is not None and (
        options.agent != "policy" or options.checkpoint is not None
    ):
        raise ConfigError(
            f"--endpoint {options.endpoint} replaces --agent and --checkpoint; remove them"
        )
    if options.endpoint is None:
        check_agent(config, options.agent, options.checkpoint)
    else:
        check_endpoint(config)
    if not isfinite(options.pass_threshold):
        raise ConfigError(f"--pass-threshold {options.pass_threshold}: give a number, such as 0.5")


def _remarks(report: EvalReport, groups: Sequence[Group]) -> Iterator[str]:
    from skyfleet.evaluation.baselines import baseline_faults
    from skyfleet.trajectories.trajectory import describe_ungraded

    if unknown := describe_ungraded(groups):
        yield f"{report.name}: {unknown}"
    for sentence in baseline_faults(report.baselines):
        yield f"{report.name}: {sentence}"


async def _evaluate(config: RunConfig, sets: dict[str, list[str]], options: _Options) -> None:
    """Evaluate the sets; each is saved when it ends, the table is printed last."""
    from skyfleet.envs.registry import env_factory, is_remote_env
    from skyfleet.evaluation.baselines import measure_baselines
    from skyfleet.evaluation.evaluate import evaluate
    from skyfleet.evaluation.report import save_report
    from skyfleet.evaluation.table import score_table
    from skyfleet.tracking.console import ConsoleTracker
    from skyfleet.trainer.limits import build_limits
    from skyfleet.trainer.tasks import load_sources

    open_env, limits = env_factory(config), build_limits(config)
    most, n_samples = config.generator.max_num_seqs, config.generator.eval_n_samples_per_prompt
    trained_envs, remarks = find_trained_envs(config)
    console = ConsoleTracker()
    reports = []
    async with _open_agent(config, options) as (policy, agent_info, step):
        for name, sources in sets.items():
            tasks = load_sources(sources, key=f"data.val_data.{name}")
            baselines = await measure_baselines(
                [
                    task
                    for task in tasks
                    if options.baselines or not is_remote_env(config, task.env_key)
                ],
                open_env,
                limits,
                max_concurrent=most,
                pass_threshold=options.pass_threshold,
            )
            with (
                console.progress(name, len(tasks) * n_samples) as advance,
                _open_store(config, options.output, agent_info, name, step, advance) as keep,
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
                    pass_threshold=options.pass_threshold,
                    agent_info=agent_info,
                    on_finished=keep,
                )
            if options.output is not None:
                save_report(options.output, report)
            reports.append(report)
            remarks += _remarks(report, groups)
    console.close()
    if evaluated := agent_info.checkpoint or agent_info.endpoint:
        print(f"evaluated {evaluated}\n")
    print(score_table(reports), end="")
    if remarks:
        print("", *remarks, sep="\n")
    if not any(report.overall.n_attempts for report in reports):
        raise EngineError("no attempt could be graded")


@contextmanager
def _open_store(
    config: RunConfig,
    output: Path | None,
    agent_info: AgentInfo,
    name: str,
    step: int,
    advance: Callable[[], None],
) -> Iterator[Callable[[Trajectory], None]]:
    """A callback that stores each finished episode, so that an interruption loses none."""
    from skyfleet.evaluation.report import open_episodes, prepare_output

    if output is None:
        yield lambda _: advance()
        return
    prepare_output(output, config, agent_info)
    with open_episodes(output, name, step) as archive:

        def keep(ended: Trajectory) -> None:
            archive.add(ended)
            advance()

        yield keep


@asynccontextmanager
async def _open_agent(
    config: RunConfig, options: _Options
) -> AsyncIterator[tuple[AgentFactory, AgentInfo, int]]:
    """The agent, its description, and the step it was trained to."""
    from skyfleet.evaluation.agent_info import AgentInfo

    generator = config.generator
    temperature = generator.eval_sampling_params.temperature
    if options.endpoint is not None and options.model is not None:
        agent_info = AgentInfo(
            model=options.model,
            endpoint=options.endpoint,
            temperature=temperature,
            max_turns=generator.max_turns,
        )
        async with open_endpoint_agent(config, options.endpoint, options.model) as policy:
            yield policy, agent_info, 0
        return
    if options.agent != "policy":
        agent_info = AgentInfo(agent=options.agent, max_turns=generator.max_turns)
        async with build_agent(config, options.agent, options.checkpoint) as (policy, _):
            yield policy, agent_info, 0
        return
    async with open_run_policy_client(config, options.checkpoint) as (policy_client, folder):
        step = policy_client.engine.policy_version
        agent_info = AgentInfo(
            model=find_model_name(config, policy_client),
            endpoint=", ".join(generator.remote_inference_engine_urls) or None,
            checkpoint=str(folder) if folder else None,
            step=step if step and generator.is_remote else None,
            temperature=temperature,
            max_turns=generator.max_turns,
        )
        yield evaluation_agent(config, policy_client), agent_info, step
