"""`skyfleet log`: a run's entry for the experiment log, as Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from skyfleet.cli.arguments import DryRun
from skyfleet.cli.run_tasks import RunPath


def log_command(
    run: RunPath,
    output: Annotated[Path | None, typer.Option(help="A file; by default it is printed.")] = None,
    dry_run: DryRun = False,
) -> None:
    """Write up a run: dataset, method, results, signal, error patterns, what to do next."""
    from skyfleet.analysis.experiment_log import experiment_entry
    from skyfleet.analysis.run_folder import open_run
    from skyfleet.storage.local import write_atomically

    entry = experiment_entry(open_run(run))
    if output is None:
        print(entry, end="")
    elif dry_run:
        print(f"would write {len(entry.splitlines())} lines to {output}")
    else:
        write_atomically(output, entry)
        print(f"The entry is in {output}.")
