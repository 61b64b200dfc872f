"""`skyfleet evaluate`: score a policy on a configuration's evaluation sets."""

from __future__ import annotations

from functools import partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyfleet.cli.agents import Agent, CheckpointPath, plan_memory, select_agent
from skyfleet.cli.arguments import ConfigArgs, DryRun, config_from, show_plan
from skyfleet.cli.interrupting import cancel_on_ctrl_c, exit_interrupted
from skyfleet.cli.run_tasks import check_eval_verifiers, find_trained_envs
from skyfleet.errors import ConfigError
from skyfleet.terminal import print

if TYPE_CHECKING:
    from skyfleet.api.evaluation import EvaluateArguments
    from skyfleet.api.policy import Policy
    from skyfleet.config.root import RunConfig


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
    from skyfleet.config.warnings import warn_greedy_evaluation
    from skyfleet.envs.event_loop import run_loop
    from skyfleet.evaluation.report import check_output

    config = config_from(config_args)
    _check_options(agent, checkpoint, endpoint, model, pass_threshold)
    sets = config.data.eval_sets
    if only is not None and only not in sets:
        raise ConfigError(f"--eval-set {only}: data.val_data has {sorted(sets) or 'no set'}")
    chosen = {name: sources for name, sources in sets.items() if only in (None, name)}
    if not chosen:
        raise ConfigError("data.val_data is empty; set the evaluation sets")
    check_eval_verifiers(config, chosen)
    if output is not None:
        check_output(output)
    if endpoint is not None:
        selected: Policy | str = _select_endpoint(config, endpoint, model)
        described = f"{model} at {endpoint}"
    else:
        selected, described = select_agent(config, agent, checkpoint), str(checkpoint or agent)
    if dry_run:
        plan = [f"would score {described} on {', '.join(chosen)}", *plan_memory(selected)]
        show_plan(config, plan if agent != "policy" else [*plan, *warn_greedy_evaluation(config)])
        return
    arguments: EvaluateArguments = {
        "pass_threshold": pass_threshold,
        "baselines": baselines or None,
        "output": None if output is None else output.absolute(),
        "progress": True,
    }
    episodes = None if output is None else output.absolute() / "trajectories"
    try:
        run_loop(cancel_on_ctrl_c(_evaluate(config, selected, chosen, arguments)))
    except KeyboardInterrupt:
        exit_interrupted(partial(_describe_interruption, output, episodes))


def _check_options(
    agent: str,
    checkpoint: str | None,
    endpoint: str | None,
    model: str | None,
    pass_threshold: float,
) -> None:
    if (endpoint is None) != (model is None):
        raise ConfigError("--endpoint and --model belong together; pass both or neither")
    if endpoint is not None and (agent != "policy" or checkpoint is not None):
        raise ConfigError(f"--endpoint {endpoint} replaces --agent and --checkpoint; remove them")
    if not isfinite(pass_threshold):
        raise ConfigError(f"--pass-threshold {pass_threshold}: give a number, such as 0.5")


def _select_endpoint(config: RunConfig, url: str, model: str | None) -> Policy:
    from skyfleet.api.models import ModelSource
    from skyfleet.api.policy import Policy
    from skyfleet.config.loading import config_from_python

    named = config_from_python(config, {"generator.served_model_name": model})
    return Policy(ModelSource(url=url), named)


def _describe_interruption(output: Path | None, episodes: Path | None) -> str:
    kept = episodes is not None and episodes.exists()
    return f"Interrupted{f'; finished episodes are in {output}' if kept else ''}."


async def _evaluate(
    config: RunConfig,
    agent: Policy | str,
    sets: dict[str, list[str]],
    arguments: EvaluateArguments,
) -> None:
    """Evaluate the sets; each is saved when it ends, the table is printed last."""
    from skyfleet.api.evaluation import evaluate_set
    from skyfleet.evaluation.table import score_table
    from skyfleet.trainer.tasks import load_sources

    trained_envs, notes = find_trained_envs(config)
    arguments["trained_envs"] = trained_envs
    if isinstance(agent, str):
        arguments["config"] = config
    evaluations = []
    try:
        # All before the first episode, which may change the working directory.
        loaded = {
            name: load_sources(sources, key=f"data.val_data.{name}")
            for name, sources in sets.items()
        }
        for name, tasks in loaded.items():
            arguments["name"] = name
            evaluations.append(await evaluate_set(agent, None, tasks, **arguments))
            notes += (f"{name}: {note}" for note in evaluations[-1].notes)
    finally:
        if not isinstance(agent, str):
            await agent.aclose()
    reports = [evaluation.report for evaluation in evaluations]
    info = reports[0].agent_info
    if info is not None and (evaluated := info.checkpoint or info.endpoint):
        print(f"evaluated {evaluated}\n")
    print(score_table(reports), end="")
    if notes:
        print("", *notes, sep="\n")
    for evaluation in evaluations:
        evaluation.require_grades()
