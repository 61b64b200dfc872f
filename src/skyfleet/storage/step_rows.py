"""Rows of JSON lines with a `step`: truncate a file to the step from which its run resumes."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from skyfleet.storage.local import write_atomically

logger = logging.getLogger(__name__)


def truncate_rows(
    path: Path, last_step: int, *, one_per_step: bool = False
) -> list[dict[str, object]]:
    """Remove the rows after `last_step`, and lines that are not rows; returns the rows that stay.

    With `one_per_step`, the last of several rows of a step stays: a process that has lost its folder
    writes before the one that took it over. The file is created if it does not exist.
    """
    kept: list[tuple[bytes, dict[str, object]]] = []
    data = path.read_bytes() if path.exists() else None
    for line in (data or b"").splitlines():
        row = parse_row(line)
        if row is None:
            # A process killed while writing leaves half a line; its step is run again.
            logger.warning("%s: dropped an incomplete line: %.60r", path, line)
        elif read_step(row) <= last_step:
            kept.append((line, row))
    if one_per_step:
        kept = _drop_repeated(path, kept)
    text = b"".join(line + b"\n" for line, _ in kept)
    if text != data:
        write_atomically(path, text)
    return [row for _, row in kept]


def _drop_repeated(
    path: Path, rows: Sequence[tuple[bytes, dict[str, object]]]
) -> list[tuple[bytes, dict[str, object]]]:
    last = {read_step(row): index for index, (_, row) in enumerate(rows)}
    if len(last) < len(rows):
        logger.warning(
            "%s: dropped %d rows of steps that another process wrote again",
            path,
            len(rows) - len(last),
        )
    return [rows[index] for index in sorted(last.values())]


def read_last_step(path: Path) -> int | None:
    """The highest step of a file's rows; None without a row."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return max((read_step(row) for line in lines if (row := parse_row(line))), default=None)


def read_step(row: dict[str, object]) -> int:
    step = row["step"]
    assert isinstance(step, int)
    return step


def find_missing(steps: Sequence[int], last_step: int) -> list[int]:
    """The steps from 0 to `last_step` that have no row."""
    present = set(steps)
    return [step for step in range(last_step + 1) if step not in present]


def parse_row(line: bytes) -> dict[str, object] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None
