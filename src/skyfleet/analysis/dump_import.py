"""Import SkyRL's evaluation dumps as a run folder."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from skyfleet.config.keys import dump_yaml
from skyfleet.config.loading import load_config
from skyfleet.errors import ConfigError
from skyfleet.evaluation.report import EvalReport, save_evaluation
from skyfleet.storage.local import atomic_folder, write_atomically
from skyfleet.trajectories.skyrl_dump import read_dump

IMPORTED = "imported_from.txt"
"""Marks a run folder that was imported from dumps, and contains their path."""
_STEP = re.compile(r"global_step_(\d+)(?:_evals)?")


def find_dumps(dumped_evals: Path) -> Iterator[tuple[str, int, Path]]:
    """Set, step and folder of each dump; files directly in a step's folder are the set `val`."""
    found = False
    for folder in sorted(dumped_evals.glob("global_step_*")):
        if match := _STEP.fullmatch(folder.name):
            for part in (folder, *sorted(folder.iterdir())):
                if part.is_dir() and any(part.glob("*.jsonl")):
                    found = True
                    yield "val" if part == folder else part.name, int(match[1]), part
    if not found:
        raise ConfigError(
            f"{dumped_evals} holds no global_step_N_evals with a .jsonl file; "
            "pass SkyRL's dumped_evals folder"
        )


def import_dumps(dumped_evals: Path, run: Path) -> None:
    """Convert SkyRL's evaluation dumps to a run folder with trajectories and reports.

    The folder appears only when it is complete.
    """
    if run.exists():
        raise ConfigError(f"{run} exists; name a new folder")
    found = list(find_dumps(dumped_evals))
    with atomic_folder(run) as draft:
        for name, step, folder in found:
            groups = read_dump(folder)
            save_evaluation(draft, EvalReport.from_groups(name, groups, step=step), groups)
        settings = [f"trainer.run_name={run.name}", f"trainer.run_path={run}"]
        write_atomically(draft / "config.yaml", dump_yaml(load_config("", settings)))
        write_atomically(draft / IMPORTED, f"{dumped_evals.resolve()}\n")
