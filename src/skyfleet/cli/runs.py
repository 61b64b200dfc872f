"""`skyfleet runs`: list, follow and stop launched runs."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer

from skyfleet.cli.launch import LAUNCHES
from skyfleet.terminal import print

runs_app = typer.Typer(
    name="runs", help="List, follow and stop launched runs.", no_args_is_help=True
)
Name = Annotated[str, typer.Argument(help="The name of a run, as `skyfleet runs list` shows it.")]


@runs_app.command("list")
def list_command() -> None:
    """List the runs that SkyPilot knows, newest first: those named fleet_*, and all launched here."""
    from skyfleet.analysis.formatting import table
    from skyfleet.launch.sky import list_runs

    launched_here = {path.stem for path in LAUNCHES.glob("*.yaml")}
    runs = list_runs(lambda name: name.startswith("fleet_") or name in launched_here)
    if not runs:
        print("no runs; skyfleet launch starts one")
        return
    rows = [
        (
            run.name,
            run.status,
            "managed job" if run.is_managed else "cluster",
            run.where or "-",
            run.resources or "-",
            str(run.recoveries),
            datetime.fromtimestamp(run.launched_at).astimezone().isoformat(timespec="minutes"),
        )
        for run in runs
    ]
    print(table(("run", "status", "kind", "where", "resources", "recoveries", "launched"), rows))


@runs_app.command("logs")
def logs_command(
    name: Name,
    follow: Annotated[bool, typer.Option("--follow/--no-follow")] = True,
) -> None:
    """Print the log of a run, until it ends."""
    from skyfleet.launch.sky import find_run, print_logs

    raise typer.Exit(print_logs(find_run(name), follow=follow))


@runs_app.command("stop")
def stop_command(
    name: Name,
    timeout_seconds: Annotated[
        int, typer.Option(min=1, help="For the checkpoint and the uploads.")
    ] = 900,
    force: Annotated[
        bool, typer.Option("--force", help="Give the machine back even if uploads are incomplete.")
    ] = False,
) -> None:
    """Save a checkpoint, wait for the uploads, and give the machine back."""
    from skyfleet.launch.sky import find_run, stop_run

    stop_run(find_run(name), timeout_seconds=timeout_seconds, force=force)
    print(f"{name} is stopped. To continue it: skyfleet launch CONFIG --resume {name}")
