"""Resume: find the checkpoint to go on from, and load it whole or not at all."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from skyfleet.checkpoints.checkpoint import Checkpoint, FileRecord, Saveable, read_checkpoint
from skyfleet.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

ResumeMode = Literal["latest", "from_path", "none"]


def find_checkpoint(
    root: Path, mode: ResumeMode, path: Path | str | None = None
) -> Checkpoint | None:
    """`latest` is the newest complete one, whatever the latest file says; None if there is none."""
    match mode:
        case "none":
            return None
        case "latest":
            return max(complete_checkpoints(root), key=lambda c: c.step, default=None)
        case "from_path":
            if path is None:
                raise ConfigError(
                    "trainer.resume_mode=from_path and trainer.resume_path is not set; "
                    "set it to a global_step_N folder"
                )
            return read_checkpoint(Path(path))


def complete_checkpoints(root: Path) -> list[Checkpoint]:
    """Drafts are passed over in silence, partial folders with a warning."""
    complete = []
    for folder in root.glob("global_step_*"):
        try:
            complete.append(read_checkpoint(folder))
        except CheckpointError as error:
            logger.warning("passed over: %s", error)
    return complete


def load_checkpoint(checkpoint: Checkpoint, parts: Mapping[str, Saveable]) -> None:
    """Every file of `parts` is checked before the first part is touched."""
    held = checkpoint.manifest.parts
    if missing := [name for name in parts if name not in held]:
        raise CheckpointError(
            f"{checkpoint.folder} has no part {missing[0]!r}; it holds {list(held)}, so resume with "
            "the configuration that saved it"
        )
    for name in parts:
        verified(checkpoint, name)
    for name, part in parts.items():
        part.load(checkpoint.folder / name)


def verified(checkpoint: Checkpoint, part: str) -> Path:
    """The folder of a part, every file in it as it was saved."""
    for name, record in checkpoint.manifest.files.items():
        if name.split("/")[0] == part:
            _verify(checkpoint.folder, name, record)
    return checkpoint.folder / part


def _verify(folder: Path, name: str, record: FileRecord) -> None:
    try:
        found = FileRecord.of(folder / name)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: {name} cannot be read ({error.strerror}); choose another checkpoint"
        ) from None
    if found != record:
        raise CheckpointError(
            f"{folder}: {name} has changed since it was saved ({found.size_bytes} bytes, sha256 "
            f"{found.sha256[:8]}…; saved {record.size_bytes} bytes, {record.sha256[:8]}…); "
            "move the folder away and the checkpoint before it is used"
        )
