"""Imported dumps: SkyRL's `dumped_evals` of an old run as a run folder that every command reads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from skyfleet.analysis.run_folder import IMPORTED
from skyfleet.config.explain import as_yaml
from skyfleet.config.loading import load_config
from skyfleet.errors import ConfigError
from skyfleet.evaluation.report import EvalReport, keep_evaluation
from skyfleet.storage.local import publishing, write_atomically
from skyfleet.trajectories.skyrl_dump import read_dump

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
            keep_evaluation(draft, EvalReport.of(name, groups, step=step), groups)
        settings = [f"trainer.run_name={run.name}", f"trainer.run_path={run}"]
        write_atomically(draft / "config.yaml", as_yaml(load_config("", settings)))
        write_atomically(draft / IMPORTED, f"{dumped_evals.resolve()}\n")
