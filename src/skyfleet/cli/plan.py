"""`skyfleet plan`: what a run will take on this machine, and what it can learn from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyfleet.cli.arguments import ConfigArgs, config_from
from skyfleet.cli.interrupting import cancel_on_ctrl_c, exit_interrupted
from skyfleet.cli.plan_gpus import measure_profile, print_gpu_plan
from skyfleet.errors import ConfigError, MissingExtraError
from skyfleet.terminal import print

if TYPE_CHECKING:
    from skyfleet.analysis.run_plan import RunPlan
    from skyfleet.config.root import RunConfig


def plan_command(
    config_args: ConfigArgs = None,
    steps: Annotated[
        int, typer.Option(min=1, help="Steps to measure; the first one is not counted.")
    ] = 4,
    eval_episodes: Annotated[
        int,
        typer.Option(min=0, help="Of each measured evaluation; 0 is 4 x generator.max_num_seqs."),
    ] = 0,
    gpus: Annotated[
        str,
        typer.Option(
            help="A number: simulate the run on so many GPUs. A name, such as H200:8: for prices; by "
            "default this machine's GPU."
        ),
    ] = "",
    dollars_per_hour: Annotated[
        float, typer.Option(min=0, help="The price of this machine, instead of SkyPilot's.")
    ] = 0,
    output: Annotated[
        Path | None, typer.Option(help="Instead of plan.json in the run's folder.")
    ] = None,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Write this machine's profile, for --gpus 1, and stop."),
    ] = False,
    profile: Annotated[
        str, typer.Option(help="With --gpus N: costs of a card, such as h200, or a measured file.")
    ] = "h200",
    placements: Annotated[
        str,
        typer.Option(help="With --gpus N: config, or all: together, and apart with every split."),
    ] = "config",
    workload: Annotated[
        Path | None, typer.Option(help="With --gpus N: a JSON file, instead of the profile's own.")
    ] = None,
    tool_seconds: Annotated[
        str, typer.Option(help="With --gpus N: of a tool call: 0.2, or lognormal:MEAN:SIGMA.")
    ] = "",
    rollout_workers: Annotated[
        int, typer.Option(min=1, help="With --gpus N: processes per node that play episodes.")
    ] = 1,
    compare: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Compare a run with its plan.json, and stop.")
    ] = None,
) -> None:
    """Measure a few steps of a run, and estimate its time, memory, tokens, cost and learning signal."""
    if compare is not None:
        _print_comparison(compare)
        return
    if measure or gpus.isdecimal():
        config = config_from(config_args)
        if measure:
            path = measure_profile(config, output)
            profile = str(path)
        if gpus.isdecimal():
            print_gpu_plan(
                config,
                int(gpus),
                profile=profile,
                placements=placements,
                workload=workload,
                tool_seconds=tool_seconds,
                rollout_workers=rollout_workers,
            )
        return
    from skyfleet.analysis.plan_text import format_plan
    from skyfleet.analysis.run_plan import PLAN, write_plan
    from skyfleet.trainer.resuming import METRICS

    config = config_from(config_args)
    folder = Path(config.trainer.run_path)
    if output is None and (folder / METRICS).exists():
        raise ConfigError(
            f"{folder} holds a run that has started, and its plan is of before; use --output, "
            "--compare, or another trainer.run_name"
        )
    plan = _measure(config, steps=steps, eval_episodes=eval_episodes)
    plan = _add_prices(plan, gpus, dollars_per_hour)
    path = output or folder / PLAN
    write_plan(path, plan)
    print(f"\n{format_plan(plan)}\n\nThe plan is in {path}.")


def _print_comparison(run: Path) -> None:
    from skyfleet.analysis.plan_comparison import compare_plan
    from skyfleet.analysis.run_folder import open_run

    print(compare_plan(open_run(run)).to_text())


def _measure(config: RunConfig, *, steps: int, eval_episodes: int) -> RunPlan:
    from skyfleet.envs.event_loop import run_loop
    from skyfleet.trainer.plan_run import plan_run

    def report(line: str) -> None:
        print(f"plan: {line}", flush=True)

    planning = plan_run(config, n_steps=steps, eval_episodes=eval_episodes, on_progress=report)
    try:
        return run_loop(cancel_on_ctrl_c(planning))
    except KeyboardInterrupt:
        exit_interrupted(lambda: "Interrupted. Nothing was written.")


def _add_prices(plan: RunPlan, gpus: str, dollars_per_hour: float) -> RunPlan:
    from skyfleet.analysis.run_plan import Price
    from skyfleet.launch.prices import find_gpu, list_prices
    from skyfleet.launch.resources import parse_gpus
    from skyfleet.launch.sky import LaunchError

    if dollars_per_hour:
        price = Price(cloud="given", instance=plan.machine, dollars_per_hour=dollars_per_hour)
        return plan.model_copy(update={"prices": [price]})
    here = find_gpu(plan.machine)
    if not gpus and here is None:
        note = "none: this machine has no GPU that clouds offer; use --dollars-per-hour"
        return plan.model_copy(update={"price_note": note})
    wanted = parse_gpus(gpus or f"{here}:1")
    try:
        prices = list_prices(wanted)
    except (MissingExtraError, LaunchError) as error:
        return plan.model_copy(update={"price_note": f"none: {error}"})
    note = "" if wanted.name == here else f"Times are of {plan.machine}, prices of {wanted}."
    return plan.model_copy(
        update={
            "prices": [
                Price(cloud=p.cloud, instance=p.instance, dollars_per_hour=p.dollars_per_hour)
                for p in prices
            ],
            "price_note": note,
        }
    )
