"""`skyfleet import-dumps`: SkyRL's evaluation dumps as a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from skyfleet.cli.arguments import DryRun
from skyfleet.terminal import print


def import_dumps_command(
    dumped_evals: Annotated[Path, typer.Argument(help="The folder of global_step_N_evals.")],
    run: Annotated[Path, typer.Argument(help="The run folder to write.")],
    dry_run: DryRun = False,
) -> None:
    """Convert dumps to a run folder for analyze, report, view, diff and log."""
    from skyfleet.analysis.dump_import import find_dumps, import_dumps

    if dry_run:
        for name, step, place in find_dumps(dumped_evals):
            print(f"would read {place} as set {name} at step {step}")
        return
    import_dumps(dumped_evals, run)
    print(f"The run is in {run}.")
