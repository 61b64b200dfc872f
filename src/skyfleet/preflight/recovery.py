"""Recovery: whether a run was started before, here or on a machine that was lost."""

from __future__ import annotations

from pathlib import Path

from skyfleet.checkpoints.resume import list_complete_checkpoints
from skyfleet.config.root import RunConfig
from skyfleet.errors import SkyfleetError
from skyfleet.trainer.bucket_layout import locate_checkpoints


def is_recovery(config: RunConfig) -> bool:
    """A checkpoint, a journal or rows of the run are here, or a checkpoint is in its bucket."""
    trainer = config.trainer
    if trainer.resume_mode == "none":
        return False
    folder = Path(trainer.run_path)
    if list_complete_checkpoints(Path(trainer.ckpt_path)):
        return True
    if (folder / "metrics.jsonl").is_file() or any((folder / "journal").glob("step_*")):
        return True
    try:
        bucket = locate_checkpoints(config)
        return bucket is not None and bucket.find_newest() is not None
    except (OSError, SkyfleetError):  # the row of the bucket says what is wrong
        return False
