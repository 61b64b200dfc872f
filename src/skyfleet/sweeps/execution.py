"""Execution: the runs of a sweep one after another, each recorded when it starts and when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

from skyfleet.errors import ConfigError, SkyfleetError
from skyfleet.storage.folder_lock import FolderLock
from skyfleet.sweeps.plan import SweepPlan, SweepRun
from skyfleet.sweeps.record import (
    RunRecord,
    State,
    SweepRecord,
    find_state,
    read_record,
    write_record,
)

Report = Callable[[str], None]
"""Shows one line."""


class RunFailedError(SkyfleetError):
    """One run of the sweep failed; the others go on."""


Runner = Callable[[SweepRun], State]
"""Trains or launches one run. Raises RunFailedError; any other exception ends the sweep."""


def run_sweep(
    plan: SweepPlan,
    runner: Runner,
    report: Report,
    *,
    on_ended: Callable[[SweepRecord], object] = lambda _: None,
) -> SweepRecord:
    """Run what is not finished, and record every outcome; the sweep's folder must be held.

    `on_ended` is called after each run, whether it failed or not.
    """
    record = read_record(plan.folder)
    states = {run.name: find_state(run, record) for run in plan.runs}
    for number, run in enumerate(plan.runs, start=1):
        title = f"run {number} of {len(plan.runs)}, {run.name}"
        if (state := states[run.name]) in ("finished", "launched"):
            report(f"{title}: {state} earlier")
            continue
        report(f"{title}: {plan.grid.describe(run.variant)}, seed {run.seed}")
        report(f"{title}: {_run_one(plan, run, runner, record)}")
        on_ended(record)
    return record


def _run_one(plan: SweepPlan, run: SweepRun, runner: Runner, record: SweepRecord) -> str:
    """How it ended."""
    earlier = record.get(run.name).seconds
    began = monotonic()

    def save(state: State, error: str = "") -> None:
        seconds = round(earlier + monotonic() - began, 1)
        record.runs[run.name] = RunRecord(
            state=state, error=error, total_steps=run.total_steps, seconds=seconds
        )
        write_record(plan.folder, record)

    save("started")
    try:
        state = runner(run)
    except RunFailedError as error:
        save("failed", str(error))
        return f"failed: {error}"
    except BaseException:
        save("started")
        raise
    save(state)
    return f"{state} after {record.get(run.name).seconds:.0f} s"


@contextmanager
def hold_sweep(folder: Path, report: Report) -> Iterator[None]:
    """No other process runs the same sweep meanwhile."""
    lock = FolderLock(folder)
    try:
        asyncio.run(lock.acquire(report))
    except ConfigError as error:
        problem = str(error).partition("; ")[0].replace("another run", "another sweep")
        raise ConfigError(f"{problem}; wait until it ends, or give --name another name") from None
    try:
        yield
    finally:
        lock.release()
