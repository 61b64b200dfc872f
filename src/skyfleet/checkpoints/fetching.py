"""Fetch the policy of a checkpoint in a bucket to this machine's cache, to evaluate or serve it."""

from __future__ import annotations

import logging

from skyfleet.checkpoints.bucket import BucketCheckpoints
from skyfleet.checkpoints.checkpoint import Checkpoint, Manifest, checkpoint_folder, read_checkpoint
from skyfleet.checkpoints.resume import read_step_number
from skyfleet.errors import CheckpointError, ConfigError
from skyfleet.storage.cache import find_cache_folder

logger = logging.getLogger(__name__)

_POLICY = "policy"


def fetch_policy(address: str) -> Checkpoint:
    """The policy at `{bucket}/{project}/{model}/{run}/global_step_N`, or of the run's newest step.

    The optimizer beside it is left out.
    """
    folder, _, name = address.rstrip("/").rpartition("/")
    step = read_step_number(name)
    if step < 0:
        folder = address.rstrip("/")
    bucket = BucketCheckpoints(address=folder)
    newest = bucket.find_newest() if step < 0 else step
    manifest = None if newest is None else bucket.read_manifest(newest)
    if manifest is None:
        raise ConfigError(
            f"{address} has no complete checkpoint; name {{bucket}}/{{project}}/{{model}}/{{run}} or "
            "a global_step_N of it that has a manifest.json"
        )
    wanted = _choose_files(manifest)
    root = find_cache_folder("checkpoints", folder)
    try:
        here = read_checkpoint(checkpoint_folder(root, manifest.step))
        if here.manifest == wanted:
            return here
    except CheckpointError:
        pass  # not here, or not whole
    logger.info("downloading the policy of %s", bucket.step_address(manifest.step))
    return bucket.download(manifest.step, root, choose=_choose_files)


def _choose_files(manifest: Manifest) -> Manifest:
    """The policy's files without its optimizer."""
    files = {
        name: record
        for name, record in manifest.files.items()
        if name.startswith(f"{_POLICY}/") and name != f"{_POLICY}/optimizer.pt"
    }
    return manifest.model_copy(update={"files": files})
