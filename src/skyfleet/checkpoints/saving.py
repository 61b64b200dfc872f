"""Save checkpoints atomically, and remove old ones (retention) only after a save succeeded."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from skyfleet.checkpoints.checkpoint import (
    MANIFEST,
    Checkpoint,
    FileRecord,
    Manifest,
    Saveable,
    checkpoint_folder,
)
from skyfleet.checkpoints.resume import find_checkpoint, list_complete_checkpoints
from skyfleet.errors import CheckpointError, DiskFullError
from skyfleet.storage.local import atomic_folder, discard, sweep, write_atomically

logger = logging.getLogger(__name__)

LATEST = "latest_ckpt_global_step.txt"


def sweep_checkpoints(root: Path) -> None:
    """Remove the drafts of killed saves; a checkpoint that was being replaced is restored."""
    sweep(root, "global_step_*")
    sweep(root, LATEST)


def prune_checkpoints(root: Path, *, max_to_keep: int, protect: Collection[int]) -> None:
    """Keep the newest `max_to_keep` checkpoints and the steps in `protect`; -1 keeps all."""
    if max_to_keep < 0:
        return
    newest_first = sorted(list_complete_checkpoints(root), key=lambda c: c.step, reverse=True)
    for checkpoint in newest_first[max_to_keep:]:
        if checkpoint.step in protect:
            continue
        try:
            discard(checkpoint.folder)
        except OSError as error:
            logger.warning(
                "the old checkpoint %s could not be removed: %s", checkpoint.folder, error
            )


def save_checkpoint(
    root: Path,
    step: int,
    parts: Mapping[str, Saveable],
    *,
    max_to_keep: int = -1,
    protect: Collection[int] = (),
) -> Checkpoint:
    """Save the parts, then apply retention, which never removes this checkpoint.

    Only one process may save to a root at a time: `FolderLock`.
    """
    folder = checkpoint_folder(root, step)
    try:
        # A killed save may have left gigabytes, and this save needs the space.
        sweep_checkpoints(root)
        with atomic_folder(folder) as draft:
            manifest = _write_parts(draft, step, parts)
        write_atomically(root / LATEST, str(step))
    # Not only OSError: torch and safetensors raise their own errors for a full disk.
    except Exception as error:
        raise CheckpointError(_describe_failure(folder, error)) from error
    prune_checkpoints(root, max_to_keep=max_to_keep, protect={*protect, step})
    return Checkpoint(folder=folder, manifest=manifest)


def _write_parts(draft: Path, step: int, parts: Mapping[str, Saveable]) -> Manifest:
    for name, part in parts.items():
        (draft / name).mkdir()
        part.save(draft / name)
    files = sorted(path for path in draft.rglob("*") if path.is_file())
    manifest = Manifest(
        step=step,
        skyfleet_version=_version(),
        parts=tuple(parts),
        files={path.relative_to(draft).as_posix(): FileRecord.of(path) for path in files},
    )
    (draft / MANIFEST).write_text(manifest.model_dump_json(indent=1))
    return manifest


def _version() -> str:
    try:
        return version("skyfleet")
    except PackageNotFoundError:
        return "not installed"  # Run from a source checkout.


def _describe_failure(folder: Path, error: Exception) -> str:
    previous = find_checkpoint(folder.parent, "latest")
    fallback = (
        f"the previous checkpoint {previous.folder.name} is intact"
        if previous
        else "there is no earlier checkpoint"
    )
    if isinstance(error, DiskFullError):
        return (
            f"{folder} was not saved: {error.reason}; free some space and run the same command "
            f"again: {fallback}"
        )
    # torch writes a C++ stack below the first line.
    reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return f"{folder} was not saved: {reason}; fix that and resume: {fallback}"
