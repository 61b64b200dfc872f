"""RunFolder: what `skyfleet train` left behind, opened for reading, also while it still grows."""

from __future__ import annotations

import json
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from skyfleet.config.explain import as_yaml
from skyfleet.config.loading import load_config, load_config_file
from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError
from skyfleet.evaluation.report import EvalReport, save_evaluation
from skyfleet.storage.local import publishing, write_atomically
from skyfleet.trajectories.archive import read_trajectories
from skyfleet.trajectories.entry import Entry, index_path
from skyfleet.trajectories.index import list_entries
from skyfleet.trajectories.records import RecordError
from skyfleet.trajectories.skyrl_dump import read_dump
from skyfleet.trajectories.trajectory import Trajectory

OnDamage = Callable[[RecordError], None]

logger = logging.getLogger(__name__)


def read_entries(
    entries: Iterable[Entry], *, on_damage: OnDamage | None = None
) -> Iterator[tuple[Entry, Trajectory]]:
    """In the order given, where the entries of a file stand together in the file's order.

    A file that is damaged or ends before an entry is a RecordError; with `on_damage` it is told,
    and left for the next.
    """
    for path, of_path in groupby(entries, key=lambda entry: entry.path):
        wanted = {entry.number: entry for entry in of_path}
        try:
            for number, trajectory in enumerate(read_trajectories(path)):
                if (entry := wanted.pop(number, None)) is not None:
                    yield entry, trajectory
                if not wanted:
                    break
            if wanted:
                raise RecordError(
                    f"{path} ends before {next(iter(wanted.values())).id} and has lost "
                    f"{len(wanted)} of its episodes; copy the file again, or remove "
                    f"{index_path(path).name} to do without them"
                )
        except RecordError as error:
            if on_damage is None:
                raise
            on_damage(error)


def warn(error: RecordError) -> None:
    """For `on_damage`, where no place of its own says what was left out."""
    logger.warning("left out: %s", error)


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


_STEP = re.compile(r"global_step_(\d+)(?:_evals)?")


def find_dumps(dumped_evals: Path) -> Iterator[tuple[str, int, Path]]:
    """Set, step and folder; what lies directly in a step's folder is the set `val`."""
    found = False
    for folder in sorted(dumped_evals.glob("global_step_*")):
        if match := _STEP.fullmatch(folder.name):
            for place in (folder, *sorted(folder.iterdir())):
                if place.is_dir() and any(place.glob("*.jsonl")):
                    found = True
                    yield "val" if place == folder else place.name, int(match[1]), place
    if not found:
        raise ConfigError(
            f"{dumped_evals} holds no global_step_N_evals with a .jsonl file; "
            "give SkyRL's dumped_evals folder"
        )


def import_dumps(dumped_evals: Path, run: Path) -> None:
    """Writes the archive, the reports, and a configuration that only names the run.

    The folder is there when all of it is.
    """
    if run.exists():
        raise ConfigError(f"{run} exists; name a folder that does not")
    found = list(find_dumps(dumped_evals))
    with publishing(run) as draft:
        for name, step, place in found:
            groups = read_dump(place)
            save_evaluation(draft, EvalReport.of(name, groups, step=step), groups)
        settings = [f"trainer.run_name={run.name}", f"trainer.run_path={run}"]
        write_atomically(draft / "config.yaml", as_yaml(load_config("", settings)))
        write_atomically(draft / IMPORTED, f"{dumped_evals.resolve()}\n")
