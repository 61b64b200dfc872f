"""Go on from a bucket: download the newest complete checkpoint and the run's records."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from skyfleet.checkpoints.bucket import BucketCheckpoints
from skyfleet.checkpoints.checkpoint import Checkpoint, Manifest, checkpoint_folder
from skyfleet.checkpoints.resume import (
    find_checkpoint,
    list_complete_checkpoints,
    read_step_number,
)
from skyfleet.config.keys import dump_yaml
from skyfleet.config.loading import load_recorded_config
from skyfleet.config.root import RunConfig
from skyfleet.errors import CheckpointError, ConfigError
from skyfleet.storage.local import make_folder, write_atomically
from skyfleet.trainer.bucket_layout import locate_checkpoints
from skyfleet.trainer.journal import clear_journal
from skyfleet.trainer.run_history import forget_other_history

logger = logging.getLogger(__name__)

CONFIG = "config.yaml"
OnProgress = Callable[[str], None]


def open_bucket_step(address: str) -> tuple[BucketCheckpoints, int]:
    """The bucket and the step of an address such as s3://bucket/project/model/run/global_step_40."""
    folder, _, name = address.rstrip("/").rpartition("/")
    step = read_step_number(name)
    if step < 0:
        raise ConfigError(
            f"trainer.resume_path={address!r} is not a checkpoint; name a global_step_N folder"
        )
    return BucketCheckpoints(address=folder), step


def read_bucket_config(bucket: BucketCheckpoints) -> RunConfig | None:
    """The configuration with which the run in the bucket was started; None without one."""
    data = bucket.read_record(CONFIG)
    if data is None:
        return None
    with TemporaryDirectory() as folder:
        path = Path(folder) / CONFIG
        path.write_bytes(data)
        return load_recorded_config(path)


def download_newer(
    config: RunConfig, bucket: BucketCheckpoints, local_step: int, on_progress: OnProgress
) -> Checkpoint | None:
    """The newest complete checkpoint in the bucket after `local_step`, verified; None without one.

    A damaged one is skipped with a warning and the one before it is used, as with local ones. The
    run's records come first: a process killed in between finds no checkpoint and starts here again.
    """
    root, restored = Path(config.trainer.ckpt_path), False
    for step in bucket.list_steps():
        if step <= local_step:
            return None
        if bucket.read_manifest(step) is None:
            logger.warning("skipped: %s is not complete", bucket.step_address(step))
            continue
        on_progress(f"downloading {bucket.step_address(step)}")
        if not restored:
            forget_other_history(config, bucket)
            restore_records(config, bucket)
            restored = True
        try:
            found = replace(bucket.download(step, root), verified=True)
        except CheckpointError as error:
            if config.trainer.resume_strict:
                raise CheckpointError(
                    f"trainer.resume_strict=true and the newest checkpoint is damaged: {error}"
                ) from None
            logger.warning("resuming from an earlier checkpoint: %s", error)
            continue
        return found
    return None


def download_reference(config: RunConfig, bucket: BucketCheckpoints, found: Checkpoint) -> None:
    """The checkpoint that is the KL reference, if the run has one and it is not here."""
    algorithm, root = config.trainer.algorithm, Path(config.trainer.ckpt_path)
    if not (algorithm.use_kl_loss or algorithm.use_kl_in_reward):
        return
    state = json.loads((found.folder / "trainer" / "state.json").read_text())
    step = state.get("reference_step", 0)
    if not checkpoint_folder(root, step).exists() and bucket.read_manifest(step):
        bucket.download(step, root)


def restore_records(config: RunConfig, bucket: BucketCheckpoints) -> None:
    """Copy the records into the run's folder, except config.yaml, which has other paths there."""
    folder = Path(config.trainer.run_path)
    make_folder(folder)
    # First: a process killed in between must not find rows without the configuration they belong to.
    write_atomically(folder / CONFIG, dump_yaml(config))
    bucket.download_records(folder, leave_out=(CONFIG,))


def find_newer_in_bucket(config: RunConfig) -> str | None:
    """The checkpoint that a run would download to resume from it; for a dry run."""
    bucket = locate_checkpoints(config)
    if bucket is None or config.trainer.resume_mode != "latest":
        return None
    local = find_checkpoint(Path(config.trainer.ckpt_path), "latest")
    newest = bucket.find_newest()
    if newest is None or (local is not None and newest <= local.step):
        return None
    return bucket.step_address(newest)


def download_resume_path(config: RunConfig, on_progress: OnProgress) -> None:
    """Copy the checkpoint at the address in `trainer.resume_path`, unless it is here."""
    address, root = str(config.trainer.resume_path), Path(config.trainer.ckpt_path)
    bucket, step = open_bucket_step(address)
    manifest = check_complete(bucket, step)
    here = [found for found in list_complete_checkpoints(root) if found.manifest == manifest]
    if not here:
        on_progress(f"downloading {address}")
        clear_journal(Path(config.trainer.run_path))  # sampled by other weights, perhaps
        bucket.download(step, root)


def check_complete(bucket: BucketCheckpoints, step: int) -> Manifest:
    if (manifest := bucket.read_manifest(step)) is None:
        raise CheckpointError(
            f"trainer.resume_path={bucket.step_address(step)!r} is not a complete checkpoint: it has "
            "no manifest.json; name another global_step_N"
        )
    return manifest
