"""Atomic writes of local files and folders: the old content stays until the new one is complete.

Only one process may write a given path at a time; any number may read it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_atomically(path: Path, data: bytes | str) -> None:
    """Replace a file; a reader sees the old or the new content, and a full disk leaves the old."""
    draft = path.with_name(f".{path.name}.draft")
    try:
        with draft.open("wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    _fsync(path.parent)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty draft folder, which replaces `folder` if the block succeeds."""
    folder = folder.resolve()  # A symlink stays, and its target is replaced.
    folder.parent.mkdir(parents=True, exist_ok=True)
    _clean_up(folder)
    draft, replaced = _draft_path(folder), _replaced_path(folder)
    try:
        draft.mkdir()
        yield draft
        for path in (*draft.rglob("*"), draft):
            _fsync(path)
        if folder.exists():
            folder.rename(replaced)
        draft.rename(folder)
        _fsync(folder.parent)
    finally:
        _clean_up(folder)


def discard(folder: Path) -> None:
    """Remove `folder`; readers no longer see it, even while the deletion is in progress."""
    folder = folder.resolve()
    folder.rename(_draft_path(folder))
    _clean_up(folder)


def sweep(parent: Path) -> None:
    """Remove what a killed `publishing` or `discard` left in `parent`."""
    for leftover in [*parent.glob(".*.draft"), *parent.glob(".*.replaced")]:
        if leftover.is_dir():
            _clean_up(parent / leftover.stem.removeprefix("."))


def _clean_up(folder: Path) -> None:
    replaced = _replaced_path(folder)
    # The process was killed between the two renames: restore the old folder.
    if replaced.exists() and not folder.exists():
        replaced.rename(folder)
    for leftover in (_draft_path(folder), replaced):
        if leftover.exists():
            shutil.rmtree(leftover)


def _draft_path(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.draft")


def _replaced_path(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.replaced")


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
