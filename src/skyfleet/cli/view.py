"""`skyfleet view RUN`: read a run's episodes in the browser."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer


def view_command(
    run: Annotated[Path, typer.Argument(help="A run folder, such as runs/local_tiny_cpu.")],
    episode: Annotated[
        str | None, typer.Option(metavar="ID", help="Open this episode, such as eval/val/40/3.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free port.")] = 0,
) -> None:
    """Read a run's episodes in the browser, also while it trains."""
    from skyfleet.analysis.run_folder import open_run
    from skyfleet.analysis.viewer.api import Viewer
    from skyfleet.analysis.viewer.server import open_viewer
    from skyfleet.trajectories.index import find_entry

    folder = open_run(run)
    if episode:
        find_entry(folder.trajectories, episode)  # fails now if there is none
    with open_viewer(Viewer(folder), port) as server, suppress(KeyboardInterrupt):
        url = server.episode_url(episode) if episode else server.url
        print(f"serving {folder.path} at {url}\nCtrl-C stops it", flush=True)
        server.serve_forever()
