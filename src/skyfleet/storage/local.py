"""Files and folders that appear whole or not at all: what was there stays until its successor is.

One process writes a given path at a time; any number may read.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_atomically(path: Path, data: bytes | str) -> None:
    """A reader sees the old content or the new, never a part; a full disk leaves the old."""
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
    _sync(path.parent)


@contextmanager
def publishing(folder: Path) -> Iterator[Path]:
    """Yields an empty draft beside `folder`, which takes its place when the block ends well."""
    folder = folder.resolve()  # behind a link its target is replaced, and the link stays
    folder.parent.mkdir(parents=True, exist_ok=True)
    _settle(folder)
    draft, replaced = _draft_of(folder), _replaced_of(folder)
    try:
        draft.mkdir()
        yield draft
        for path in (*draft.rglob("*"), draft):
            _sync(path)
        if folder.exists():
            folder.rename(replaced)
        draft.rename(folder)
        _sync(folder.parent)
    finally:
        _settle(folder)


def discard(folder: Path) -> None:
    """Remove `folder`; it is gone for readers at once, however long the deletion takes."""
    folder = folder.resolve()
    folder.rename(_draft_of(folder))
    _settle(folder)


def sweep(parent: Path) -> None:
    """Clear what a killed `publishing` or `discard` left in `parent`."""
    for leftover in [*parent.glob(".*.draft"), *parent.glob(".*.replaced")]:
        if leftover.is_dir():
            _settle(parent / leftover.stem.removeprefix("."))


def _settle(folder: Path) -> None:
    replaced = _replaced_of(folder)
    # Stopped between the two renames: the old folder comes back.
    if replaced.exists() and not folder.exists():
        replaced.rename(folder)
    for leftover in (_draft_of(folder), replaced):
        if leftover.exists():
            shutil.rmtree(leftover)


def _draft_of(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.draft")


def _replaced_of(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.replaced")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
