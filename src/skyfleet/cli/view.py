"""`skyfleet view RUN`: read a run's episodes in the browser."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import typer

from skyfleet.cli.arguments import AllowHost
from skyfleet.cli.run_tasks import RunPath
from skyfleet.terminal import print


def view_command(
    run: RunPath,
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
    from skyfleet.api.runs import load_run
    from skyfleet.serving.access import check_bind, read_token

    token = read_token()
    check_bind(host, token)  # before a run that is not there
    opened = load_run(run)
    viewer = opened.view(
        port=port,
        open_browser=False,
        episode=episode,
        host=host,
        token=token,
        allowed_hosts=allow_host or (),
    )
    with suppress(KeyboardInterrupt):
        if token is not None:
            print(f"log in once at {viewer.root_url}?token=<SKYFLEET_API_KEY>")
        print(f"serving {opened.path} at {viewer.url}\nCtrl-C stops it", flush=True)
        viewer.wait()
