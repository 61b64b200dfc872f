"""`skyfleet view RUN`: read a run's episodes in the browser."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from skyfleet.cli.arguments import AllowHost
from skyfleet.terminal import print


def view_command(
    run: Annotated[Path, typer.Argument(help="A run folder, such as runs/local_tiny_cpu.")],
    episode: Annotated[
        str | None, typer.Option(metavar="ID", help="Open this episode, such as eval/val/40/3.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="0.0.0.0 listens on all interfaces, and needs SKYFLEET_API_KEY.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free port.")] = 0,
    allow_host: AllowHost = None,
) -> None:
    """Read a run's episodes in the browser, also while it trains."""
    from skyfleet.analysis.run_folder import open_run
    from skyfleet.analysis.viewer.api import Viewer
    from skyfleet.analysis.viewer.server import ViewerAccess, open_viewer
    from skyfleet.serving.access import read_token
    from skyfleet.trajectories.index import find_entry

    token = read_token()
    access = ViewerAccess(host, token=token, allowed_hosts=allow_host or ())
    folder = open_run(run)
    if episode:
        find_entry(folder.trajectories, episode)  # fails now if there is none
    with open_viewer(Viewer(folder), port, access=access) as server, suppress(KeyboardInterrupt):
        url = server.episode_url(episode) if episode else server.url
        if token is not None:
            print(f"log in once at {server.url}?token=<SKYFLEET_API_KEY>")
        print(f"serving {folder.path} at {url}\nCtrl-C stops it", flush=True)
        server.serve_forever()
