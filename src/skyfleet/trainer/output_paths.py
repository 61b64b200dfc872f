"""The folders that a run writes to, resolved once: an environment may change the working directory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyfleet.config.keys import flatten
from skyfleet.config.root import RunConfig
from skyfleet.storage.objects import is_address
from skyfleet.storage.store import read_bucket
from skyfleet.storage.working_directory import anchor_path

_FOLDERS = ("run_path", "ckpt_path", "export_path")
_BUCKETS = ("ckpt_bucket", "trajectory_bucket")


def anchor_paths(config: RunConfig) -> RunConfig:
    """The configuration with absolute folders. Records and messages show them as they were given."""
    trainer, generator = config.trainer, config.generator
    paths = {name: str(anchor_path(getattr(trainer, name))) for name in _FOLDERS}
    buckets = {name: read_bucket(value) for name in _BUCKETS if (value := getattr(trainer, name))}
    anchored: dict[str, Any] = {"trainer": trainer.model_copy(update={**paths, **buckets})}
    if generator.weight_sync_dir is not None and not is_address(generator.weight_sync_dir):
        folder = str(anchor_path(generator.weight_sync_dir))
        generator = generator.model_copy(update={"weight_sync_dir": folder})
    deltas = generator.delta_weight_sync
    if deltas.sync_dir is not None and not is_address(deltas.sync_dir):
        deltas = deltas.model_copy(update={"sync_dir": str(anchor_path(deltas.sync_dir))})
        generator = generator.model_copy(update={"delta_weight_sync": deltas})
    anchored["generator"] = generator
    return config.model_copy(update=anchored)


def list_given_paths(config: RunConfig) -> Mapping[str, Any]:
    """The keys that `anchor_paths` changes, with the values that they were given; no secrets."""
    folders = {"generator.weight_sync_dir", "generator.delta_weight_sync.sync_dir"}
    keys = folders | {*(f"trainer.{name}" for name in (*_FOLDERS, *_BUCKETS))}
    return {key: value for key, value in flatten(config).items() if key in keys}
