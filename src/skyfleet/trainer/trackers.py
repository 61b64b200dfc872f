"""The trackers of a run: the console, metrics.jsonl, those of trainer.logger, and Prometheus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from skyfleet.config.keys import flatten
from skyfleet.config.root import RunConfig
from skyfleet.serving.access import read_token
from skyfleet.tracking.code_version import find_code_version
from skyfleet.tracking.prometheus_tracker import PrometheusTracker
from skyfleet.tracking.tracker import Tracker, make_trackers


def build_trackers(
    config: RunConfig, resume_step: int | None, total_steps: int, given_paths: Mapping[str, Any]
) -> Sequence[Tracker]:
    trainer = config.trainer
    others = [name for name in trainer.logger if name not in ("console", "jsonl")]
    code_version = find_code_version().flatten() if others else {}
    served = _serve_metrics(config)
    try:
        trackers = make_trackers(
            ["console", "jsonl", *others],
            run_folder=Path(trainer.run_path),
            run_name=trainer.run_name,
            project_name=trainer.project_name,
            config={**flatten(config), **given_paths, **code_version},
            resume_step=resume_step,
            # The rows of a checkpoint that is resumed by its path may be in another run's folder.
            has_rows=trainer.resume_mode == "latest",
            total_steps=total_steps,
            wandb=trainer.wandb,
        )
    except BaseException:
        for tracker in served:
            tracker.close()
        raise
    return [*trackers, *served]


def _serve_metrics(config: RunConfig) -> list[PrometheusTracker]:
    section = config.trainer.prometheus
    if section.port is None:
        return []
    return [
        PrometheusTracker(
            run_name=config.trainer.run_name,
            port=section.port,
            host=section.host,
            token=read_token(),
            allowed_hosts=section.allowed_hosts,
        )
    ]
