"""Screenshots of the viewer: python -m tests.analysis.viewer_screens RUN docs/images."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.analysis.viewer_browser import chromium, go
from tests.analysis.viewer_run import viewing

from skyfleet.analysis.run_folder import open_run
from skyfleet.analysis.viewer.server import ViewerServer
from skyfleet.trajectories.entry import Entry


def take_screens(browser: Any, server: ViewerServer, run: Path, folder: Path) -> list[Path]:
    lost, earlier, won = _episodes(run)
    at_lost = f"env={lost.env_key}&outcome=failed&episode={lost.id}"
    screens = {
        "light": ("light", 1280, at_lost),
        "dark": ("dark", 1280, at_lost),
        "compare": ("light", 1280, f"episode={earlier.id}&with={won.id}"),
        "tokens": ("light", 1280, f"episode={won.id}&tokens=1"),
        "narrow": ("light", 400, f"episode={won.id}"),
    }
    taken = []
    for name, (scheme, width, address) in screens.items():
        page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 800})
        go(page, server, address)
        page.wait_for_selector(".heading")
        # Wait until the list shows the failure classes.
        page.wait_for_function(
            "() => / episodes$/.test(document.getElementById('run-facts').textContent)"
            " && !document.getElementById('run-facts').textContent.includes('classifying')",
            timeout=300_000,
        )
        page.wait_for_load_state("networkidle")
        taken.append(folder / f"viewer_{name}.png")
        page.screenshot(path=taken[-1])
        page.close()
    return taken


def _episodes(run: Path) -> tuple[Entry, Entry, Entry]:
    """A late failure, and two attempts at one task: an early failure and a late pass."""
    evals = [entry for entry in open_run(run).entries() if entry.kind == "eval"]
    last = max(entry.step for entry in evals)
    lost = next(e for e in evals if e.step == last and not e.success and _errors(e))
    early = {e.task_key: e for e in evals if e.step < last and e.success is False}
    won = next(
        e for e in evals if e.step == last and e.success and e.turns > 2 and e.task_key in early
    )
    return lost, early[won.task_key], won


def _errors(entry: Entry) -> int:
    return entry.tool_errors + entry.malformed_calls


if __name__ == "__main__":
    run, images = map(Path, sys.argv[1:])
    with viewing(run) as server, chromium() as browser:
        take_screens(browser, server, run, images)
