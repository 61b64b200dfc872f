"""Archive: every trajectory of a run on disk, one JSONL file per step and kind.

A file appears whole or not at all; writing a step again replaces its file.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from skyfleet.trajectories.records import RecordError, from_record, to_record
from skyfleet.trajectories.trajectory import Group, Trajectory

logger = logging.getLogger(__name__)


def train_path(folder: Path, step: int) -> Path:
    """`train_path(run, 12)` is `run/train/step_000012.jsonl`."""
    return folder / "train" / f"step_{step:06d}.jsonl"


def eval_path(folder: Path, name: str, step: int) -> Path:
    """`eval_path(run, "held_out", 0)` is `run/eval/held_out/step_000000.jsonl`."""
    return folder / "eval" / name.replace("/", "_") / f"step_{step:06d}.jsonl"


def write_groups(path: Path, groups: Sequence[Group]) -> None:
    """One line per attempt, in the groups' order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("w", encoding="ascii") as file:
            for group in groups:
                for trajectory in group.trajectories:
                    # ASCII, because a model may put half a surrogate pair into its arguments.
                    file.write(json.dumps(to_record(trajectory), separators=(",", ":")) + "\n")
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def read_trajectories(path: Path) -> Iterator[Trajectory]:
    """The attempts in the order written; a last line that was cut short is left out, and said."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                trajectory = from_record(json.loads(line))
            except RecordError as error:
                raise RecordError(f"{path}:{number}: {error}") from None
            except ValueError as error:
                if not line.endswith(b"\n"):
                    logger.warning("%s:%d was cut short; its attempt is left out", path, number)
                    return
                raise RecordError(f"{path}:{number}: {error}; copy the file again") from None
            yield trajectory
