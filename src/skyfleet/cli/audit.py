"""`skyfleet audit`: wins that look unearned, as episodes to read."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from skyfleet.cli.run_tasks import RunPath, tasks_of
from skyfleet.cli.tables import table


def audit_command(
    run: RunPath,
    replay: Annotated[
        bool, typer.Option("--replay", help="Also replay every win in its world.")
    ] = False,
) -> None:
    """List wins on an untouched state, without a needed tool, or that a replay does not win."""
    from skyfleet.analysis.audit import audit
    from skyfleet.analysis.run_folder import open_run
    from skyfleet.envs.registry import env_factory

    folder = open_run(run)
    entries = folder.entries()
    won = [entry for entry in entries if entry.success]
    tasks = tasks_of(folder, won)
    if unknown := sum(entry.task_key not in tasks for entry in won):
        print(f"{unknown} wins are of tasks that the configuration no longer names: not judged.")
    open_env = env_factory(folder.config) if replay else None
    findings = asyncio.run(audit(entries, tasks, open_env))
    rows = [(f.entry_id, f.env_key, f.task_key, f.suspicion.value, f.detail) for f in findings]
    if rows:
        print(table(("episode", "environment", "task", "suspicion", "detail"), rows))
    print(f"{len(won):,} wins, {len(rows)} findings.")
