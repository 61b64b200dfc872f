"""`skyfleet launch`: run a configuration on a GPU of any cloud, through SkyPilot."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
import yaml

from skyfleet.cli.arguments import DryRun
from skyfleet.errors import ConfigError, MissingExtraError
from skyfleet.terminal import print

if TYPE_CHECKING:
    from skyfleet.launch.plan import LaunchOptions, LaunchPlan
    from skyfleet.launch.source_commit import SourceCommit

LAUNCHES = Path("runs/launches")


def launch_command(
    config_args: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE [key=value]...", help="A YAML file, a preset or a task file; overrides."
        ),
    ] = None,
    cloud: Annotated[str, typer.Option(help="any, or names separated by commas.")] = "any",
    gpus: Annotated[str, typer.Option(help="Name and number per node; by default H200:1.")] = "",
    nodes: Annotated[int, typer.Option(min=0, help="Several nodes form a Ray cluster.")] = 0,
    spot: Annotated[
        bool, typer.Option("--spot", help="Spot machines; SkyPilot replaces a preempted one.")
    ] = False,
    modality: Annotated[
        Literal["", "tool_use", "computer_use", "both"],
        typer.Option(help="By default that of the dataset."),
    ] = "",
    resume: Annotated[str, typer.Option(help="The name of a run to continue.")] = "",
    run_name: Annotated[str, typer.Option(help="Instead of fleet_{modality}_{8 hex}.")] = "",
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A variable of the task file; repeatable."),
    ] = None,
    disk_gb: Annotated[int, typer.Option(min=0, help="0 estimates it.")] = 0,
    memory_gb: Annotated[int, typer.Option(min=0, help="0 estimates it.")] = 0,
    wandb: Annotated[bool, typer.Option("--wandb/--no-wandb", help="Log to W&B.")] = True,
    attach: Annotated[
        bool, typer.Option("--attach", help="Follow the run; replace a lost machine.")
    ] = False,
    allow_dirty: Annotated[
        bool, typer.Option("--allow-dirty", help="Send uncommitted changes too.")
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Launch a configuration or a task file on the cheapest cloud, or resume a run under its name."""
    from skyfleet.launch.aws_keys import find_aws_keys, read_forwarded
    from skyfleet.launch.plan import LaunchOptions, check_resumable
    from skyfleet.launch.plan_checks import check_dataset
    from skyfleet.launch.source_commit import find_commit

    commit = find_commit(Path.cwd())
    if commit.dirty and not (allow_dirty or dry_run):
        raise ConfigError(
            f"{commit.root} has uncommitted changes, so commit {commit.sha[:12]} would not name what "
            "runs; commit them, or use --allow-dirty"
        )
    if resume and run_name:
        raise ConfigError(f"--resume {resume} and --run-name {run_name}: use one of them")
    keys = find_aws_keys()
    options = LaunchOptions(
        cloud=cloud,
        gpus=gpus,
        nodes=nodes,
        spot=spot,
        modality=modality,
        run_name=resume or run_name,
        disk_gb=disk_gb,
        memory_gb=memory_gb,
        wandb=wandb,
        has_aws_keys=keys is not None,
        environment=read_forwarded(os.environ, keys),
        resumes=bool(resume),
        variables=parse_variables(env or []),
    )
    plan = _plan(config_args or [], options, commit)
    if keys is not None:
        plan = replace(plan, notes=(*plan.notes, *keys.describe()))
        if plan.dataset and not any(name.startswith("AWS_") for name in options.variables):
            plan = replace(plan, notes=(*plan.notes, check_dataset(plan.dataset)))
    if resume:
        plan = replace(plan, notes=(*plan.notes, check_resumable(plan)))
    if dry_run:
        _show_dry_run(plan, is_refused=commit.dirty and not allow_dirty)
        return
    launch_plan(plan, root=commit.root, spot=spot, attach=attach)


def _plan(arguments: list[str], options: LaunchOptions, commit: SourceCommit) -> LaunchPlan:
    from skyfleet.launch.plan import is_task_file, plan_launch, plan_task_file

    if not arguments or "=" in arguments[0]:
        raise ConfigError(
            "skyfleet launch needs a configuration or a task file first, such as fleet_tool_use "
            "(skyfleet presets) or tasks/openenv-fleet-grpo.yaml"
        )
    name, *overrides = arguments
    tree = _read_yaml(Path(name))
    if not is_task_file(tree):
        return plan_launch(name, overrides, options, root=commit.root, commit=str(commit))
    return plan_task_file(tree, name, overrides, options, root=commit.root, commit=str(commit))


def _read_yaml(path: Path) -> Any:
    """None if it is no YAML file: a preset's name, or a mistake that loading it reports."""
    if not path.is_file():
        return None
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        return None


_NAMED_BY_OPTIONS = {
    "RUN_NAME": "the machine has the run's name too; use --run-name",
    "RESUME_RUN_NAME": "use --resume, which checks that the run has a checkpoint",
    "GIT_COMMIT": "it is the commit of this clone",
}


def parse_variables(assignments: list[str]) -> dict[str, str]:
    from skyfleet.launch.task_file import DEFAULT_VARIABLES

    variables: dict[str, str] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if name in _NAMED_BY_OPTIONS:
            raise ConfigError(f"--env {name}: {_NAMED_BY_OPTIONS[name]}")
        if not equals or name not in DEFAULT_VARIABLES:
            raise ConfigError(
                f"--env {name}: write NAME=VALUE with one of {', '.join(DEFAULT_VARIABLES)}; "
                "secrets are taken from this environment"
            )
        variables[name] = value
    return variables


def _show_dry_run(plan: LaunchPlan, *, is_refused: bool) -> None:
    """Print the task file, then what would happen, and what would refuse it here, as comments."""
    from skyfleet.launch.sky import parse_task

    problems = list(plan.problems)
    if is_refused:
        problems.append("the clone has uncommitted changes; commit them, or use --allow-dirty")
    try:
        _read_secrets(plan)
    except ConfigError as error:
        problems.append(str(error))
    notes = [*plan.notes, *(f"would be refused: {problem}" for problem in problems)]
    try:
        parse_task(plan.text)
        notes.append("SkyPilot accepts the task")
    except MissingExtraError as error:
        notes.append(f"not checked by SkyPilot: {error}")
    print(plan.text, end="")
    print("\n".join(f"# {line}" for line in notes), flush=True)


def _read_secrets(plan: LaunchPlan) -> dict[str, str]:
    from skyfleet.launch.aws_keys import find_aws_keys
    from skyfleet.launch.secrets import read_secrets

    keys = find_aws_keys()
    environ = {**os.environ, **(keys.secrets if keys else {})}
    return read_secrets(plan.secret_names, plan.modality, environ)


def launch_plan(plan: LaunchPlan, *, root: Path, spot: bool, attach: bool) -> None:
    """Launch a run; with `attach`, follow it until it ends."""
    from skyfleet.launch.credentials import write_credentials
    from skyfleet.launch.prices import format_prices
    from skyfleet.launch.sky import JobEnd, launch_task, parse_task, run_until_ended, write_task

    if plan.problems:
        raise ConfigError("\n".join(plan.problems))
    secrets = _read_secrets(plan)
    os.chdir(root)  # the task's workdir
    task = parse_task(plan.text, secrets)
    if not task.envs.get("DOLLARS_PER_HOUR"):
        prices = format_prices(plan.gpus, num_nodes=plan.num_nodes, spot=spot)
        task.update_envs({"DOLLARS_PER_HOUR": prices})
    for path in write_credentials(Path.home(), os.environ):
        print(f"wrote {path} from the environment")
    kept = write_task(plan.text, LAUNCHES, plan.run_name)
    print(f"launching {plan.run_name}; its task file is {kept}")
    for line in plan.notes[1:]:
        print(line)
    if not attach:
        launch_task(task, plan.run_name, spot=spot)
        print(
            f"{plan.run_name} is launched. Its log: skyfleet runs logs {plan.run_name}. "
            f"To end it: skyfleet runs stop {plan.run_name}"
        )
        return
    end = run_until_ended(task, plan.run_name, spot=spot)
    print(f"{plan.run_name} {end.value}")
    if end is not JobEnd.SUCCEEDED:
        raise typer.Exit(1)
