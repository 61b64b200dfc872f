"""`skyfleet log`: write a run up for the experiment log, as Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from skyfleet.cli.run_tasks import RunPath
from skyfleet.terminal import print

EXPERIMENTS = Path("docs/experiments.md")
"""In a clone; elsewhere the file of this name in the current folder."""


def log_command(
    run: RunPath,
    output: Annotated[Path | None, typer.Option(help="A file; by default it is printed.")] = None,
    append: Annotated[
        bool,
        typer.Option(
            "--append",
            help="Append the entry to --output, or else to docs/experiments.md if there is one, or experiments.md.",
        ),
    ] = False,
) -> None:
    """Write up a run: dataset, method, results, learning signal, errors, next steps."""
    from skyfleet.analysis.experiment_log import experiment_entry
    from skyfleet.analysis.run_folder import open_run
    from skyfleet.storage.local import write_atomically

    entry = experiment_entry(open_run(run))
    if append:
        path = output or (EXPERIMENTS if EXPERIMENTS.is_file() else Path(EXPERIMENTS.name))
        before = path.read_text(encoding="utf-8") if path.exists() else "# Experiments\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, f"{before.rstrip()}\n\n{entry}")
        tracked = "; commit it before `skyfleet launch`" if path == EXPERIMENTS else ""
        print(f"The entry is appended to {path}{tracked}.")
    elif output is None:
        print(entry, end="")
    else:
        write_atomically(output, entry)
        print(f"The entry is in {output}.")
