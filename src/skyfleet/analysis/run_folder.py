"""RunFolder: what `skyfleet train` left behind, opened for reading, also while it still grows."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from skyfleet.config.loading import load_config_file
from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError
from skyfleet.evaluation.report import EvalReport
from skyfleet.trajectories.entry import Entry
from skyfleet.trajectories.index import list_entries


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
            step = int(path.parent.name.removeprefix("step_"))
            reports[path.stem][step] = EvalReport.from_json(path.read_text())
        return reports

    def entries(self) -> list[Entry]:
        """Every episode, training first."""
        return list_entries(self.trajectories)


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
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
