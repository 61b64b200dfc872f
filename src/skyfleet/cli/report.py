"""`skyfleet report`: one HTML page for one run or several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from skyfleet.cli.arguments import DryRun
from skyfleet.terminal import print


def report_command(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Run folders, or their s3:// addresses.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            help="The file to write, or the folder for report.html; by default the first run's, or for an address the current."
        ),
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Write a run's report as one HTML file; several runs are compared with the first."""
    from skyfleet.api.runs import load_run
    from skyfleet.storage.store import is_remote

    first, *others = map(load_run, runs)
    if output is None and is_remote(runs[0]):
        output = Path()  # not the cache
    page = first.find_report_path(output)
    if dry_run:
        names = ", ".join(run.name for run in (first, *others))
        print(f"would write the report of {names} to {page}")
        return
    first.report(*others, output=output)
    print(f"The report is in {page} ({page.stat().st_size / 1000:.0f} kB): open it in a browser.")
