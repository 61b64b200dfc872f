"""`skyfleet view RUN`: leaf through a run's episodes in the browser."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from skyfleet.cli.arguments import DryRun


def view_command(
    run: Annotated[Path, typer.Argument(help="A run folder, such as runs/local_tiny_cpu.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    dry_run: DryRun = False,
) -> None:
    """Read a run's episodes in the browser, also while it trains."""
    from skyfleet.analysis.run_folder import open_run
    from skyfleet.analysis.viewer.api import Viewer
    from skyfleet.analysis.viewer.server import opened

    folder = open_run(run)
    if dry_run:
        print(f"would show {len(folder.entries())} episodes of {folder.path} on this machine")
        return
    with opened(Viewer(folder), port) as server, suppress(KeyboardInterrupt):
        print(f"reading {folder.path} at {server.url}; Ctrl-C ends it", flush=True)
        server.serve_forever()
