"""`skyfleet audit`: list suspicious passes for a person to read."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from skyfleet.analysis.formatting import format_count, table
from skyfleet.cli.run_tasks import RunPath, load_episode_tasks
from skyfleet.terminal import print, sanitize


def audit_command(
    run: RunPath,
    replay: Annotated[
        bool, typer.Option("--replay", help="Also replay every pass in its environment.")
    ] = False,
) -> None:
    """List passes with an unchanged state, without a required tool, or that fail on replay."""
    from skyfleet.analysis.audit import Suspicion, audit
    from skyfleet.analysis.missing_episodes import find_missing_episodes, reject_without_episodes
    from skyfleet.analysis.run_folder import open_run, warn
    from skyfleet.envs.event_loop import run_loop
    from skyfleet.envs.registry import env_factory
    from skyfleet.tracking.console import ConsoleTracker

    folder = open_run(run)
    reject_without_episodes(folder)
    if (missing := find_missing_episodes(folder)) is not None:
        print(f"Incomplete: {sanitize(missing.describe())}.")
    entries = folder.entries(on_damage=warn)
    won = [entry for entry in entries if entry.success]
    tasks = load_episode_tasks(folder, won)
    if unknown := sum(entry.task_key not in tasks for entry in won):
        of = format_count(unknown, "win")
        print(f"Not judged, because the configuration no longer names their tasks: {of}.")
    open_env = env_factory(folder.config) if replay else None
    console = ConsoleTracker(stream=sys.stderr)
    graded = sum(entry.success is not None for entry in entries)
    with console.progress("graded episodes", graded) as advance:
        found = run_loop(audit(entries, tasks, open_env, on_read=advance))
    console.close()
    rows = [
        (f.entry_id, f.env_key, f.task_key, f.suspicion.value, f.detail) for f in found.findings
    ]
    if rows:
        print(table(("episode", "environment", "task", "suspicion", "detail"), rows))
    print(f"{format_count(len(won), 'win')}, {format_count(len(rows), 'finding')}.")
    for suspicion in [s for s in Suspicion if replay or s is not Suspicion.REPLAY_FAILS]:
        noun = "failure" if suspicion is Suspicion.DOMINANT_MESSAGE else "win"
        print(f"{suspicion.value} could judge {format_count(found.judged[suspicion], noun)}.")
