"""Keeping: an evaluation as a run folder, so that whatever reads a run reads it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from skyfleet.config.explain import as_yaml
from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError
from skyfleet.evaluation.report import EvalReport
from skyfleet.storage.local import write_atomically
from skyfleet.trajectories.archive import eval_path, write_groups
from skyfleet.trajectories.trajectory import Group


def prepare_output(output: Path, config: RunConfig) -> None:
    """Before any work: what could not be kept at the end is refused now."""
    if (output / "metrics.jsonl").exists():
        raise ConfigError(f"--output {output} holds a training run; name another folder")
    try:
        output.mkdir(parents=True, exist_ok=True)
        write_atomically(output / "config.yaml", as_yaml(config))
    except OSError as error:
        raise ConfigError(
            f"--output {output}: {error.strerror}; name a folder that can be written"
        ) from None


def keep_evaluation(output: Path, report: EvalReport, groups: Sequence[Group]) -> None:
    """Where a run has them, so that whatever reads a run reads these."""
    write_groups(eval_path(output / "trajectories", report.name, report.step), groups)
    path = output / "reports" / f"step_{report.step:06d}" / f"{report.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, report.to_json())
