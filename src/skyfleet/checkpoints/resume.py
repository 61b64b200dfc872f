"""Find, verify and load checkpoints; trainer/resuming.py decides from which a run resumes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from skyfleet.checkpoints.checkpoint import Checkpoint, FileRecord, Saveable, read_checkpoint
from skyfleet.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

ResumeMode = Literal["latest", "from_path", "none"]


def find_checkpoint(
    root: Path, mode: ResumeMode, path: Path | str | None = None
) -> Checkpoint | None:
    """Find the checkpoint that a resume mode names, unverified; None if there is none.

    `mode` is trainer.resume_mode and `path` is trainer.resume_path. `latest` is the newest complete
    checkpoint, whatever latest_ckpt_global_step.txt contains.
    """
    match mode:
        case "none":
            return None
        case "latest":
            return max(list_complete_checkpoints(root), key=lambda c: c.step, default=None)
        case "from_path":
            if path is None:
                raise ConfigError(
                    "trainer.resume_mode=from_path, but trainer.resume_path is not set; "
                    "set it to a global_step_N folder"
                )
            return read_checkpoint(Path(path))


def find_verified_checkpoint(
    root: Path, mode: ResumeMode, path: Path | str | None = None, *, strict: bool = False
) -> Checkpoint | None:
    """As `find_checkpoint`, with the hash of every file checked before any of them is loaded.

    With `latest`, a damaged checkpoint is skipped with a warning and the one before it is used;
    `strict` (trainer.resume_strict) raises instead. So does `from_path`, and a folder in which
    every checkpoint is damaged.
    """
    if mode != "latest":
        found = find_checkpoint(root, mode, path)
        return None if found is None else verify_checkpoint(found)
    damages: list[CheckpointError] = []
    folders = sorted(
        _list_folders(root), key=lambda folder: read_step_number(folder.name), reverse=True
    )
    for folder in folders:
        try:
            found = verify_checkpoint(read_checkpoint(folder))
        except CheckpointError as damage:
            damages.append(damage)
            if strict:
                raise CheckpointError(
                    f"trainer.resume_strict=true and the newest checkpoint is damaged: {damage}"
                ) from None
            continue
        for sentence in damages:
            logger.warning("resuming from %s instead: %s", folder.name, sentence)
        return found
    if damages:
        raise CheckpointError(
            f"{root} has no intact checkpoint to resume from ({len(damages)} damaged; the newest: "
            f"{damages[0]}); restore one, or give trainer.run_name (run_dir= in Python) another "
            "name to start over"
        )
    return None


def _list_folders(root: Path) -> list[Path]:
    return [folder for folder in root.glob("global_step_*") if read_step_number(folder.name) >= 0]


def read_step_number(name: str) -> int:
    """The step in the name of a checkpoint's folder; -1 for another name."""
    number = name.removeprefix("global_step_")
    return int(number) if name != number and number.isdecimal() else -1


def list_complete_checkpoints(root: Path) -> list[Checkpoint]:
    """List complete checkpoints; an incomplete folder is skipped with a warning."""
    complete = []
    for folder in _list_folders(root):
        try:
            complete.append(read_checkpoint(folder))
        except CheckpointError as error:
            logger.warning("skipped: %s", error)
    return complete


def load_checkpoint(checkpoint: Checkpoint, parts: Mapping[str, Saveable]) -> None:
    """Load the parts; every file is verified before the first part is loaded."""
    saved = checkpoint.manifest.parts
    if missing := [name for name in parts if name not in saved]:
        raise CheckpointError(
            f"{checkpoint.folder} has no part {missing[0]!r}; it contains {list(saved)}, so resume with "
            "the configuration that saved it"
        )
    if not checkpoint.verified:
        for name in parts:
            verify_part(checkpoint, name)
    for name, part in parts.items():
        part.load(checkpoint.folder / name)


def verify_checkpoint(checkpoint: Checkpoint) -> Checkpoint:
    """Check the hash of every file; loading the result does not check them again."""
    for name, record in checkpoint.manifest.files.items():
        _verify(checkpoint.folder, name, record)
    return replace(checkpoint, verified=True)


def verify_part(checkpoint: Checkpoint, part: str) -> Path:
    """Check the hash of every file of a part and return its folder."""
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
            "choose another checkpoint or move the folder away"
        )
