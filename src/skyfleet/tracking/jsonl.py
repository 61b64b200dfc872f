"""JsonlTracker: a file anything can read, one row a step.

`metrics.jsonl` is the same, byte for byte, for two runs of one seed; what depends on the machine
(`timing/*`) is in `timing.jsonl`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import TextIO

from skyfleet.storage.local import write_atomically

logger = logging.getLogger(__name__)


class JsonlTracker:
    def __init__(self, folder: Path, *, resume_step: int | None) -> None:
        """Rows after `resume_step` are cut off; None starts both files afresh."""
        folder.mkdir(parents=True, exist_ok=True)
        self._metrics = _reopened(folder / "metrics.jsonl", resume_step)
        self._timing = _reopened(folder / "timing.jsonl", resume_step)
        self._warned = False

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        timing = {key: value for key, value in metrics.items() if key.startswith("timing/")}
        self._write(self._metrics, {k: v for k, v in metrics.items() if k not in timing}, step)
        self._write(self._timing, timing, step)

    def close(self) -> None:
        self._metrics.close()
        self._timing.close()

    def _write(self, file: TextIO, metrics: Mapping[str, float], step: int) -> None:
        row: dict[str, float | None] = {"step": step}
        for key, value in sorted(metrics.items()):
            row[key] = float(value) if isfinite(value) else None
        odd = [key for key, value in row.items() if value is None]
        if odd and not self._warned:
            logger.warning(
                "step %d: %s is %s, written as null (said once)", step, odd[0], metrics[odd[0]]
            )
            self._warned = True
        file.write(json.dumps(row) + "\n")
        file.flush()


def _reopened(path: Path, resume_step: int | None) -> TextIO:
    lines = path.read_bytes().splitlines() if resume_step is not None and path.exists() else []
    kept = [line for line in lines if _counts(line, resume_step, path)]
    write_atomically(path, b"".join(line + b"\n" for line in kept))
    return path.open("a", encoding="utf-8")


def _counts(line: bytes, resume_step: int | None, path: Path) -> bool:
    try:
        step: int = json.loads(line)["step"]
    except ValueError:
        # A kill while writing tears the last line; its step is run again.
        logger.warning("%s: dropped a line that is not whole: %.60r", path, line)
        return False
    return resume_step is not None and step <= resume_step
