"""`skyfleet evaluate`: score a policy on a configuration's evaluation sets."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyfleet.cli.agents import Agent, CheckpointPath, policy_of, step_of
from skyfleet.cli.arguments import DryRun, Words, config_from, show_plan
from skyfleet.errors import ConfigError

if TYPE_CHECKING:
    from skyfleet.config.root import RunConfig
    from skyfleet.evaluation.report import EvalReport


def evaluate_command(
    words: Words = None,
    agent: Agent = "policy",
    checkpoint: CheckpointPath = None,
    only: Annotated[str | None, typer.Option("--set", help="One evaluation set.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for the reports.")] = None,
    dry_run: DryRun = False,
) -> None:
    """Score a checkpoint, a model, or a scripted agent (oracle, null)."""
    config = config_from(words)
    sets = config.data.eval_sets
    if only is not None and only not in sets:
        raise ConfigError(f"--set {only}: data.val_data names {sorted(sets) or 'no set'}")
    chosen = {name: sources for name, sources in sets.items() if only in (None, name)}
    if not chosen:
        raise ConfigError("data.val_data is empty: name the sets to evaluate on")
    if dry_run:
        show_plan(config, [f"would score {checkpoint or agent} on {', '.join(chosen)}"])
        return
    for report in asyncio.run(_evaluate(config, chosen, agent, checkpoint)):
        for env_key, score in {**report.by_env, "all": report.overall}.items():
            rate, (low, high) = score.success_rate, score.interval
            shown = "unknown" if rate is None else f"{rate:6.1%}  [{low:.1%}, {high:.1%}]"
            unknown = f"  ({score.n_unknown} unknown)" if score.n_unknown else ""
            print(f"{report.name:18} {env_key:10} {score.n_tasks:5} tasks  {shown}{unknown}")
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
            (output / f"{report.name}.json").write_text(report.to_json())


async def _evaluate(
    config: RunConfig, sets: dict[str, list[str]], agent: Agent, checkpoint: Path | None
) -> list[EvalReport]:
    from skyfleet.envs.registry import env_factory
    from skyfleet.evaluation.evaluate import evaluate
    from skyfleet.tracking.console import ConsoleTracker
    from skyfleet.trainer.limits import limits_of
    from skyfleet.trainer.sources import load_sources

    policy = await policy_of(config, agent, checkpoint)
    console = ConsoleTracker()
    reports = []
    for name, sources in sets.items():
        tasks = load_sources(sources, key=f"data.val_data.{name}")
        n_samples = config.generator.eval_n_samples_per_prompt
        with console.progress(name, len(tasks) * n_samples) as advance:
            report, _ = await evaluate(
                name,
                tasks,
                env_factory(config),
                policy,
                limits_of(config),
                step=step_of(config, agent, checkpoint),
                n_samples=n_samples,
                max_concurrent=config.generator.max_num_seqs,
                on_finished=lambda _: advance(),
            )
        reports.append(report)
    console.close()
    return reports
