"""RunFolder: read the files of a training run, also while it is still running, or from a bucket."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from skyfleet.analysis.bucket_runs import fetch_run
from skyfleet.analysis.dump_import import IMPORTED
from skyfleet.config.loading import load_recorded_config
from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError
from skyfleet.evaluation.report import EvalReport
from skyfleet.storage.store import is_remote
from skyfleet.trajectories.archive import read_trajectories
from skyfleet.trajectories.entry import Entry, index_path
from skyfleet.trajectories.index import list_entries
from skyfleet.trajectories.records import RecordError
from skyfleet.trajectories.trajectory import Trajectory

OnDamage = Callable[[RecordError], None]
logger = logging.getLogger(__name__)


def read_entries(
    entries: Iterable[Entry], *, on_damage: OnDamage | None = None
) -> Iterator[tuple[Entry, Trajectory]]:
    """Load the trajectories of entries; those of one file must be adjacent and in file order.

    A damaged or truncated file raises RecordError; with `on_damage` the error is reported and the
    rest of the file is skipped.
    """
    for path, file_entries in groupby(entries, key=lambda entry: entry.path):
        wanted = {entry.number: entry for entry in file_entries}
        try:
            for number, trajectory in enumerate(read_trajectories(path)):
                if (entry := wanted.pop(number, None)) is not None:
                    yield entry, trajectory
                if not wanted:
                    break
            if wanted:
                raise RecordError(
                    f"{path} ends before {next(iter(wanted.values())).id}: {len(wanted)} episodes "
                    f"are missing; copy the file again, or remove {index_path(path).name} to "
                    "continue without them"
                )
        except RecordError as error:
            if on_damage is None:
                raise
            on_damage(error)


def warn(error: RecordError) -> None:
    """An `on_damage` callback that logs the error."""
    logger.warning("skipped: %s", error)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    path: Path
    config: RunConfig
    address: str | None = None
    """Of a run in a bucket, whose files are in `path` in a cache."""

    @property
    def place(self) -> str:
        """What the user named: the address or the folder."""
        return self.address or str(self.path)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def trajectories(self) -> Path:
        return self.path / "trajectories"

    @property
    def imported(self) -> bool:
        """Whether it was imported from dumps; then settings, tokens and times are unknown."""
        return (self.path / IMPORTED).is_file()

    def metrics(self) -> list[dict[str, float]]:
        """One row per step, with the key `step`."""
        return _read_rows(self.path / "metrics.jsonl")

    def timing(self) -> list[dict[str, float]]:
        """The timings of the same steps, in seconds."""
        return _read_rows(self.path / "timing.jsonl")

    def reports(self) -> Mapping[str, Mapping[int, EvalReport]]:
        """By set, then by step."""
        reports: dict[str, dict[int, EvalReport]] = defaultdict(dict)
        for path in sorted(self.path.glob("reports/step_*/*.json")):
            step = path.parent.name.removeprefix("step_")
            if not step.isdecimal():
                raise RecordError(
                    f"{path.parent} has no step number; move it out of {self.path}/reports"
                )
            try:
                reports[path.stem][int(step)] = EvalReport.from_json(path.read_text())
            except ValueError as error:
                raise RecordError(f"{path}: {error}") from None
        return reports

    def entries(self, *, on_damage: Callable[[RecordError], None] | None = None) -> list[Entry]:
        """Every episode, training first; with `on_damage` unreadable files are skipped."""
        return list_entries(self.trajectories, on_damage=on_damage)


def open_run(path: Path | str) -> RunFolder:
    """Open a run folder, or a run or SkyRL's dumps at an address such as s3://bucket/evals/run."""
    address = str(path).rstrip("/") if is_remote(path) else None
    path = fetch_run(address) if address else Path(path)
    config = path / "config.yaml"
    if not config.is_file():
        raise ConfigError(
            f"{path} is not a run folder: it has no config.yaml; pass runs/<run_name>"
        )
    return RunFolder(path=path, config=load_recorded_config(config), address=address)


def _read_rows(path: Path) -> list[dict[str, float]]:
    """Read a JSONL file; ignores a last line that is still being written."""
    if not path.exists():
        return []
    lines = path.read_text(errors="backslashreplace").splitlines(keepends=True)
    return [
        _parse_row(line, f"{path} line {number}")
        for number, line in enumerate(lines, start=1)
        if line.endswith("\n")
    ]


def _parse_row(line: str, where: str) -> dict[str, float]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise RecordError(f"{where}: {error}; remove the line, or copy the file again") from None
    if not isinstance(row, dict) or "step" not in row:
        raise RecordError(f"{where}: not a row of metrics; remove the line, or copy the file again")
    return row
