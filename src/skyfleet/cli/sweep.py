"""`skyfleet sweep`: train a configuration with several values, data sizes and seeds, and compare them."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyfleet.cli.arguments import DryRun
from skyfleet.cli.interrupting import exit_interrupted, repeat_command
from skyfleet.cli.launch import launch_plan, parse_variables
from skyfleet.errors import ConfigError
from skyfleet.terminal import print

if TYPE_CHECKING:
    from skyfleet.launch.plan import LaunchOptions
    from skyfleet.sweeps.execution import Runner
    from skyfleet.sweeps.plan import SweepPlan
    from skyfleet.sweeps.results import SweepResults


def sweep_command(
    config_args: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE key=a,b,c [key=value]...",
            help="A YAML file or a preset; keys with several values are swept, the others set.",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each setting, from trainer.seed on.")] = 3,
    data_sizes: Annotated[
        str, typer.Option(metavar="N,N,...", help="Numbers of training tasks; nested subsets.")
    ] = "",
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[key=]VALUE", help="What the others are compared with; by default the first."
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="Of the sweep; its folder is runs/NAME.")] = "",
    launch: Annotated[
        bool,
        typer.Option("--launch", help="Launch each run on a cloud, as `skyfleet launch` does."),
    ] = False,
    cloud: Annotated[str, typer.Option(help="With --launch: any, or names with commas.")] = "any",
    gpus: Annotated[str, typer.Option(help="With --launch: by default H200:1.")] = "",
    spot: Annotated[bool, typer.Option("--spot", help="With --launch: spot machines.")] = False,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="With --launch: a variable of the task file."),
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Train every combination of values with every seed; one page compares them with the baseline."""
    from skyfleet.launch.aws_keys import find_aws_keys, read_forwarded
    from skyfleet.launch.plan import LaunchOptions
    from skyfleet.sweeps.grid import build_grid
    from skyfleet.sweeps.plan import plan_sweep
    from skyfleet.sweeps.record import check_folders, read_record
    from skyfleet.sweeps.tables import format_plan

    if not config_args or "=" in config_args[0]:
        raise ConfigError(
            "skyfleet sweep needs a configuration first, such as tiny (skyfleet presets) or run.yaml"
        )
    config_name, *arguments = config_args
    grid = build_grid(arguments, n_seeds=seeds, data_sizes=data_sizes, baseline=baseline or ())
    plan = plan_sweep(config_name, grid, name=name, allow_absent_data=launch)
    record = read_record(plan.folder)
    check_folders(plan, record)
    runner = None
    if launch:
        keys = find_aws_keys()
        options = LaunchOptions(
            cloud=cloud,
            gpus=gpus,
            spot=spot,
            has_aws_keys=keys is not None,
            environment=read_forwarded(os.environ, keys),
            variables=parse_variables(env or []),
        )
        runner = _plan_launches(plan, options, dry_run=dry_run)
    elif gpus or spot or env or cloud != "any":
        raise ConfigError("--cloud, --gpus, --spot and --env are options of --launch; add it")
    if dry_run:
        print(format_plan(plan, record))
        return
    _finish(_run(plan, runner))


def _run(plan: SweepPlan, runner: Runner | None) -> SweepResults:
    from skyfleet.sweeps.execution import hold_sweep, run_sweep
    from skyfleet.sweeps.local_process import LocalRunner, SweepInterruptedError
    from skyfleet.sweeps.page import write_page
    from skyfleet.sweeps.record import SweepRecord, read_record
    from skyfleet.sweeps.results import read_results

    def report(line: str) -> None:
        print(line, flush=True)

    def write(record: SweepRecord) -> SweepResults:
        results = read_results(plan, record)
        write_page(results)
        return results

    runner = runner or LocalRunner(config_name=plan.config_name, report=report)
    with hold_sweep(plan.folder, report):
        try:
            record = run_sweep(plan, runner, report, on_ended=write)
        except (KeyboardInterrupt, SweepInterruptedError) as end:
            write(read_record(plan.folder))
            sent = end.sent if isinstance(end, SweepInterruptedError) else signal.SIGINT
            exit_interrupted(lambda: f"Interrupted. To continue: {repeat_command()}", sent)
        return write(record)


def _finish(results: SweepResults) -> None:
    from skyfleet.analysis.formatting import format_count
    from skyfleet.sweeps.page import PAGE
    from skyfleet.sweeps.tables import format_results

    folder = results.plan.folder
    print(f"\n{format_results(results)}")
    launched = [one.run.name for one in results.runs if one.state == "launched"]
    if launched:
        print(
            f"{format_count(len(launched), 'run')} launched (skyfleet runs list). When they have "
            f"ended, copy the folder of each to {folder}/RUN and repeat the command, which then "
            "compares them."
        )
    for one in results.failed:
        print(f"{one.run.name} failed: {one.record.error}")
    print(f"The page: {folder / PAGE}. The runs: {folder}/*")
    if results.failed:
        print("To try the failed runs again, repeat the command; finished runs are not repeated.")
        raise typer.Exit(1)


def _plan_launches(plan: SweepPlan, options: LaunchOptions, *, dry_run: bool) -> Runner:
    """Check the launch of every run before the first machine is paid for."""
    from skyfleet.errors import SkyfleetError
    from skyfleet.launch.plan import plan_launch
    from skyfleet.launch.source_commit import find_commit
    from skyfleet.sweeps.execution import RunFailedError
    from skyfleet.sweeps.plan import SweepRun
    from skyfleet.sweeps.record import State

    commit = find_commit(Path.cwd())
    if commit.dirty and not dry_run:
        raise ConfigError(f"{commit.root} has uncommitted changes; commit them, and launch again")
    plans = {
        run.name: plan_launch(
            plan.config_name,
            run.overrides,
            replace(options, run_name=run.name),
            root=commit.root,
            commit=str(commit),
        )
        for run in plan.runs
    }
    first = plans[plan.runs[0].name]
    if dry_run:
        print("\n".join([*first.notes, *(f"would be refused: {one}" for one in first.problems)]))
    elif first.problems:
        raise ConfigError("\n".join(first.problems))

    def launch_run(run: SweepRun) -> State:
        try:
            launch_plan(plans[run.name], root=commit.root, spot=options.spot, attach=False)
        except SkyfleetError as error:
            raise RunFailedError(str(error)) from None
        return "launched"

    return launch_run
