"""Keeping: where a run folder has its evaluations, for `train`, `evaluate` and imported ones."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from skyfleet.config.explain import as_yaml
from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError
from skyfleet.evaluation.player import Player, differences
from skyfleet.evaluation.report import EvalReport
from skyfleet.storage.local import write_atomically
from skyfleet.trajectories.archive import EpisodeWriter, eval_path, write_groups
from skyfleet.trajectories.trajectory import Group


def check_output(output: Path) -> None:
    """Before any work, and without a trace: what could not be kept at the end is refused now."""
    if (output / "metrics.jsonl").exists():
        raise ConfigError(f"--output {output} holds a training run; name another folder")
    whole = output.absolute()
    there = next(path for path in (whole, *whole.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        problem = "cannot be written" if there.is_dir() else "is a file"
        raise ConfigError(
            f"--output {output}: {there} {problem}; name a folder that can be written"
        )


def prepare_output(output: Path, config: RunConfig, player: Player) -> None:
    """A folder is one player's: what reads a run would take two for one that changed."""
    check_output(output)
    for path in sorted(output.glob("reports/step_*/*.json")):
        other = EvalReport.from_json(path.read_text()).played_by
        if other is not None and (apart := differences(other, player)):
            raise ConfigError(
                f"--output {output} holds what another played ({'; '.join(apart)}); "
                "name another folder"
            )
    try:
        output.mkdir(parents=True, exist_ok=True)
        write_atomically(output / "config.yaml", as_yaml(config))
    except OSError as error:
        raise ConfigError(
            f"--output {output}: {error.strerror}; name a folder that can be written"
        ) from None


def open_episodes(output: Path, name: str, step: int) -> EpisodeWriter:
    """Keeps episodes as they end. An older report tells of others, and goes first."""
    _path(output, name, step).unlink(missing_ok=True)
    return EpisodeWriter(eval_path(output / "trajectories", name, step))


def keep_evaluation(output: Path, report: EvalReport, groups: Sequence[Group]) -> None:
    """The report and its episodes, so that whatever reads a run reads these."""
    write_groups(eval_path(output / "trajectories", report.name, report.step), groups)
    keep_report(output, report)


def keep_report(folder: Path, report: EvalReport) -> None:
    path = _path(folder, report.name, report.step)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, report.to_json())


def kept_report(folder: Path, name: str, step: int) -> EvalReport | None:
    path = _path(folder, name, step)
    return EvalReport.from_json(path.read_text()) if path.exists() else None


def _path(folder: Path, name: str, step: int) -> Path:
    return folder / "reports" / f"step_{step:06d}" / f"{name}.json"
