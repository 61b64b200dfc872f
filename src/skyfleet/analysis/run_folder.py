"""RunFolder: what `skyfleet train` left behind, opened for reading, also while it still grows."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from skyfleet.config.loading import load_config_file
from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError
from skyfleet.evaluation.report import EvalReport
from skyfleet.trajectories.entry import Entry
from skyfleet.trajectories.index import list_entries
from skyfleet.trajectories.records import RecordError

IMPORTED = "imported_from.txt"
"""Lies in a run folder that was made of another program's dumps, and names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    path: Path
    config: RunConfig

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def trajectories(self) -> Path:
        return self.path / "trajectories"

    @property
    def imported(self) -> bool:
        """Made of dumps: the configuration only names it, and method, tokens and times are unknown."""
        return (self.path / IMPORTED).is_file()

    def metrics(self) -> list[dict[str, float]]:
        """One row a step, `step` among its keys."""
        return _rows(self.path / "metrics.jsonl")

    def timing(self) -> list[dict[str, float]]:
        """The same steps' seconds."""
        return _rows(self.path / "timing.jsonl")

    def reports(self) -> Mapping[str, Mapping[int, EvalReport]]:
        """By set, then by step."""
        reports: dict[str, dict[int, EvalReport]] = defaultdict(dict)
        for path in sorted(self.path.glob("reports/step_*/*.json")):
            step = path.parent.name.removeprefix("step_")
            if not step.isdecimal():
                raise RecordError(
                    f"{path.parent} names no step; move it out of {self.path}/reports"
                )
            try:
                reports[path.stem][int(step)] = EvalReport.from_json(path.read_text())
            except ValueError as error:
                raise RecordError(f"{path}: {error}") from None
        return reports

    def entries(self, *, on_damage: Callable[[RecordError], None] | None = None) -> list[Entry]:
        """Every episode, training first. With `on_damage` a file that cannot be read is left out."""
        return list_entries(self.trajectories, on_damage=on_damage)


def open_run(path: Path) -> RunFolder:
    config = path / "config.yaml"
    if not config.is_file():
        raise ConfigError(
            f"{path} is not a run folder: it has no config.yaml; give runs/<run_name>"
        )
    return RunFolder(path=path, config=load_config_file(str(config)))


def _rows(path: Path) -> list[dict[str, float]]:
    """A last line that is still being written is left for the next look."""
    if not path.exists():
        return []
    lines = path.read_text(errors="backslashreplace").splitlines(keepends=True)
    return [
        _row(line, f"{path} line {number}")
        for number, line in enumerate(lines, start=1)
        if line.endswith("\n")
    ]


def _row(line: str, where: str) -> dict[str, float]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise RecordError(f"{where}: {error}; remove the line, or copy the file again") from None
    if not isinstance(row, dict) or "step" not in row:
        raise RecordError(f"{where}: no step's numbers; remove the line, or copy the file again")
    return row
