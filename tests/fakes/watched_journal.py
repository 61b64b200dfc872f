"""Counts what killed runs play and record, and learns their journals again from the first checkpoint."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fakes.crash_runs import describe_run, list_differences, start_run, wait_for

from skyfleet.envs.env import Env
from skyfleet.rollouts.episode import collect
from skyfleet.tasks.task import Task
from skyfleet.trainer import rollouts
from skyfleet.trainer.journal import Journal
from skyfleet.trajectories.journal_segment import JournalRecord, SegmentWriter, read_segment

OPENED, RECORDED, REMOVED = Path("opened"), Path("recorded"), Path("removed_segments")
"""In the folder of a run: a line per environment opened for training, a line with step and process
per episode recorded, and the segments that checkpoints made superfluous."""


def watch_journal() -> None:
    """Count in every run that is forked later from this process."""
    write, follow = SegmentWriter.write, Journal.follow_checkpoint

    async def collect_and_count(tasks: Any, open_env: Any, *args: Any, **more: Any) -> Any:
        async def open_and_count(task: Task) -> Env:
            _append(OPENED, task.key)
            env: Env = await open_env(task)
            return env

        return await collect(tasks, open_and_count, *args, **more)

    def write_and_count(writer: SegmentWriter, record: JournalRecord) -> None:
        write(writer, record)
        _append(RECORDED, f"{record.step} {os.getpid()}")

    def keep_and_follow(journal: Journal, step: int) -> None:
        REMOVED.mkdir(exist_ok=True)
        for path in journal.folder.glob("*.jsonl"):
            shutil.copy(path, REMOVED / f".{path.name}")
            (REMOVED / f".{path.name}").replace(REMOVED / path.name)
        follow(journal, step)

    replacements: list[tuple[object, str, object]] = [
        (rollouts, "collect", collect_and_count),
        (SegmentWriter, "write", write_and_count),
        (Journal, "follow_checkpoint", keep_and_follow),
    ]
    for owner, name, replacement in replacements:
        setattr(owner, name, replacement)


def _append(path: Path, line: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, f"{line}\n".encode())
    os.close(file)


def read_count(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def has_mixed_step(folder: Path) -> bool:
    """A step was sampled by two processes, so in other batches, which may round differently."""
    recorded = folder / RECORDED
    sampled_by = set(recorded.read_text().splitlines()) if recorded.exists() else set()
    steps = [line.split()[0] for line in sampled_by]
    text = (folder / "log.txt").read_text()
    is_noted = re.search(r"\d+ rollouts from the journal, [1-9]\d* played", text) is not None
    return len(steps) > len(set(steps)) or is_noted


def list_relearnt_differences(folder: Path, overrides: Sequence[str]) -> list[str]:
    """Learn the journal of a finished run from checkpoint 0: its weights must be the same to the bit.

    They are only if the run has learnt each episode once and has drawn each prompt once.
    """
    again = folder.with_name(f"{folder.name} relearnt")
    shutil.copytree(folder / "run", again / "run")
    run = again / "run"
    if (folder / REMOVED).exists():
        for path in (folder / REMOVED).glob("step_*.jsonl"):
            if not (run / "journal" / path.name).exists():
                shutil.copy(path, run / "journal" / path.name)
    for path in (
        *run.glob("checkpoints/*"),
        *run.glob("exports/*"),
        *run.glob("trajectories/train/*"),
    ):
        if path.name != "global_step_0":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    code, _ = wait_for(start_run(again, overrides))
    text = (again / "log.txt").read_text()
    if code != 0:
        return [f"relearning ended with exit code {code}: {text[-2000:]}"]
    differences = list_differences(describe_run(again), describe_run(folder))
    if opened := read_count(again / OPENED):
        differences.append(f"the journal was not complete: {opened} episodes were played")
    shutil.rmtree(again)
    return [f"relearnt from the journal: {sentence}" for sentence in differences]


def count_repeated_records(folder: Path) -> int:
    """Episodes that are in a segment more than once."""
    n_repeated = 0
    for path in (folder / "run" / "journal").glob("step_*.jsonl"):
        places = [record.place for record in read_segment(path, lambda _: None)]
        n_repeated += len(places) - len(set(places))
    return n_repeated
