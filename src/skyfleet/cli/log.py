"""`skyfleet log`: write a run up for the experiment log, as Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from skyfleet.cli.run_tasks import RunPath
from skyfleet.terminal import print

EXPERIMENTS = Path("docs/experiments.md")


def log_command(
    run: RunPath,
    output: Annotated[Path | None, typer.Option(help="A file; by default it is printed.")] = None,
    append: Annotated[
        bool, typer.Option("--append", help="Append the entry to docs/experiments.md or --output.")
    ] = False,
) -> None:
    """Write up a run: dataset, method, results, learning signal, errors, next steps."""
    from skyfleet.analysis.experiment_log import experiment_entry
    from skyfleet.analysis.run_folder import open_run
    from skyfleet.storage.local import write_atomically

    entry = experiment_entry(open_run(run))
    if append:
        path = output or EXPERIMENTS
        before = path.read_text(encoding="utf-8") if path.exists() else "# Experiments\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, f"{before.rstrip()}\n\n{entry}")
        print(f"The entry is appended to {path}.")
    elif output is None:
        print(entry, end="")
    else:
        write_atomically(output, entry)
        print(f"The entry is in {output}.")
