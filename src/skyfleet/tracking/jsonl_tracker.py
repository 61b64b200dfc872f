"""JsonlTracker: one row per step in metrics.jsonl and timing.jsonl of the run folder."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import isfinite, isnan
from pathlib import Path
from typing import TextIO

from skyfleet.storage.disk_full import explain_disk_full
from skyfleet.storage.local import make_folder, write_atomically
from skyfleet.storage.step_rows import find_missing, parse_row, read_step, truncate_rows

logger = logging.getLogger(__name__)


_EMPTY_AT_TIMES = (
    *("generation/", "train/", "loss/"),
    *("reward/avg_raw_reward", "reward/parse_failure_rate"),
)
"""Means of a step in which nothing may be learnt: they have no value, and nothing is wrong."""
_OF_MACHINE = ("timing/", "checkpoint/")


class JsonlTracker:
    """`metrics.jsonl` and `timing.jsonl`, one JSON object per step.

    `metrics.jsonl` is byte-identical for two runs with the same seed; values that depend on the
    machine (`timing/*`, `checkpoint/*`) go to `timing.jsonl`.
    """

    def __init__(self, folder: Path, *, resume_step: int | None, has_rows: bool = False) -> None:
        """Rows after `resume_step` are removed; None starts both files empty.

        `has_rows`: a file without any row has lost them.
        """
        make_folder(folder)
        self._metrics = _reopen(folder / "metrics.jsonl", resume_step, has_rows=has_rows)
        self._timing = _reopen(folder / "timing.jsonl", resume_step, has_rows=has_rows)
        self._warned = False

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        timing = {key: value for key, value in metrics.items() if key.startswith(_OF_MACHINE)}
        self._write(self._metrics, {k: v for k, v in metrics.items() if k not in timing}, step)
        self._write(self._timing, timing, step)

    def sync(self) -> None:
        for file in (self._metrics, self._timing):
            with explain_disk_full(Path(file.name)):
                os.fsync(file.fileno())

    def close(self) -> None:
        for file in (self._metrics, self._timing):
            # A row that did not fit on a full disk was reported when it was written.
            with suppress(OSError):
                file.close()

    def _write(self, file: TextIO, metrics: Mapping[str, float], step: int) -> None:
        row: dict[str, float | None] = {"step": step}
        for key, value in sorted(metrics.items()):
            row[key] = float(value) if isfinite(value) else None
        not_finite = [
            key
            for key, value in row.items()
            if value is None and not (isnan(metrics[key]) and key.startswith(_EMPTY_AT_TIMES))
        ]
        if not_finite and not self._warned:
            logger.warning(
                "step %d: %s is %s and is written as null; further cases are not reported",
                step,
                not_finite[0],
                metrics[not_finite[0]],
            )
            self._warned = True
        with explain_disk_full(Path(file.name)):
            file.write(json.dumps(row) + "\n")
            file.flush()


def _reopen(path: Path, resume_step: int | None, *, has_rows: bool) -> TextIO:
    if resume_step is None:
        write_atomically(path, b"")
        return path.open("a", encoding="utf-8")
    steps = [read_step(row) for row in truncate_rows(path, resume_step, one_per_step=True)]
    # A run that began from another run's checkpoint has no rows of the steps before it.
    missing = [
        step
        for step in find_missing(steps, resume_step)
        if (step > steps[0] if steps else has_rows)
    ]
    if missing:
        logger.warning(
            "%s has no row for %d of the steps before step %d, the first is step %d: the file was "
            "changed or damaged outside the run, which goes on without them",
            path,
            len(missing),
            resume_step + 1,
            missing[0],
        )
    return path.open("a", encoding="utf-8")


def read_rows_until(
    folder: Path, last_step: int | None
) -> Iterator[tuple[int, Mapping[str, float]]]:
    """The rows of a run up to a step, for a tracker that has lost them; without nulls."""
    for name in ("metrics.jsonl", "timing.jsonl"):
        path = folder / name
        for line in path.read_bytes().splitlines() if path.exists() else ():
            row = parse_row(line)
            if row is not None and last_step is not None and read_step(row) <= last_step:
                numbers = {k: v for k, v in row.items() if isinstance(v, float)}
                yield read_step(row), numbers
