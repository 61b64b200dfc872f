"""Atomic writes of local files and folders: the old content stays until the new one is complete.

Only one process may write a given path at a time; any number may read it.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from skyfleet.storage.disk_full import explain_disk_full

# File systems that cannot sync a folder (some FUSE, SMB and NFS servers) answer with one of these.
_NO_FOLDER_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.ENOSYS})


def write_atomically(path: Path, data: bytes | str) -> None:
    """Replace a file; a reader sees the old or the new content, and a full disk leaves the old."""
    draft = path.with_name(f".{path.name}.draft")
    with explain_disk_full(path):
        try:
            with draft.open("wb") as file:
                file.write(data.encode() if isinstance(data, str) else data)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents so that a power failure does not undo it."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    with explain_disk_full(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for path in missing:
            sync_folder(path.parent)


def find_existing_folder(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    path = path.expanduser().absolute()
    return next(one for one in (path, *path.parents) if one.exists())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable: files created, renamed and removed."""
    try:
        sync_file(folder)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty draft folder, which replaces `folder` if the block succeeds."""
    folder = folder.resolve()  # A symlink stays, and its target is replaced.
    make_folder(folder.parent)
    _clean_up(folder)
    draft, replaced = _draft_path(folder), _replaced_path(folder)
    try:
        # Inside `try`: it measures the free space before the draft is removed.
        with explain_disk_full(folder):
            draft.mkdir()
            yield draft
            for path in (*draft.rglob("*"), draft):
                sync_folder(path) if path.is_dir() else sync_file(path)
            if folder.exists():
                folder.rename(replaced)
            draft.rename(folder)
            sync_folder(folder.parent)
    finally:
        _clean_up(folder)


def discard(folder: Path) -> None:
    """Remove `folder`; readers no longer see it, even while the deletion is in progress."""
    folder = folder.resolve()
    folder.rename(_draft_path(folder))
    # Before the deletion: a power failure must not leave half a folder under its own name.
    sync_folder(folder.parent)
    _clean_up(folder)


def sweep(parent: Path, pattern: str = "*") -> None:
    """Remove what killed writers and `discard` left in `parent` of the files and folders named so."""
    for leftover in [*parent.glob(f".{pattern}.draft"), *parent.glob(f".{pattern}.replaced")]:
        if leftover.is_dir() or leftover.suffix == ".replaced":
            _clean_up(parent / leftover.stem.removeprefix("."))
        else:
            leftover.unlink(missing_ok=True)


def _clean_up(folder: Path) -> None:
    replaced = _replaced_path(folder)
    # The process was killed between the two renames: restore the old folder.
    if replaced.exists() and not folder.exists():
        replaced.rename(folder)
    for leftover in (_draft_path(folder), replaced):
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:  # something else had the folder's name
            leftover.unlink(missing_ok=True)


def _draft_path(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.draft")


def _replaced_path(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.replaced")


def sync_file(path: Path) -> None:
    """Make the content of a file durable, whoever wrote it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
