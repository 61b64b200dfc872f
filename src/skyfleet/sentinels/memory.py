"""Memory: the rows of metrics.jsonl, so that a resumed run remembers what an unbroken one would."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

N_FIRST, N_LAST = 3, 50
"""Rows."""

Row = Mapping[str, float]


class Memory:
    def __init__(self, metrics: Path) -> None:
        self._path = metrics
        self._read_bytes = 0
        self._first: list[Row] = []
        self._last: deque[Row] = deque(maxlen=N_LAST)

    def recall(self) -> tuple[Sequence[Row], Sequence[Row]]:
        """The run's first and last rows of a training step, as far as they are written."""
        for line in self._new_lines():
            values = json.loads(line)
            if values["step"] == 0:
                continue
            row = {key: value for key, value in values.items() if value is not None}
            if len(self._first) < N_FIRST:
                self._first.append(row)
            self._last.append(row)
        return self._first, list(self._last)

    def _new_lines(self) -> list[bytes]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._read_bytes)
            lines = file.readlines()
            self._read_bytes = file.tell()
        return lines
