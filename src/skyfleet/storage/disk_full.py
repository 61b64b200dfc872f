"""Errors of a disk: a full one is one sentence with file and free space, any other names its file."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from skyfleet.errors import CheckpointError, DiskFullError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_BROKEN = (errno.EIO, errno.EROFS, errno.ESTALE, errno.EFBIG)
"""A write or an fsync fails with one of these, and the system does not name the file."""
_RUST_ERROR = "SafetensorError"
"""Has the system's text in its message."""
_TORCH_WRITER, _NEARLY_FULL_BYTES = ("inline_container.cc", "iostream error"), 1_000_000
"""torch.save reports a short write without its cause."""


@contextmanager
def explain_disk_full(path: Path) -> Iterator[None]:
    """Raise DiskFullError if the block fails because a file system is full.

    It names `path`, unless the error is of a file on another file system. An OSError of a broken disk
    that names no file gets `path`.
    """
    try:
        yield
    except (DiskFullError, CheckpointError):
        raise  # a sentence already
    except Exception as error:
        if (found := _find_disk_full(error, path)) is None:
            if isinstance(error, OSError) and not error.filename and error.errno in _BROKEN:
                error.filename = str(path)
            raise
        cause, full = found
        raise DiskFullError(full, f"{cause} ({describe_free_space(full)})") from error


def _find_disk_full(error: BaseException | None, path: Path) -> tuple[str, Path] | None:
    """`No space left on device` or `Disk quota exceeded` if that caused the error, and where."""
    while error is not None:
        for number in _FULL:
            named = type(error).__name__ == _RUST_ERROR and os.strerror(number) in str(error)
            if named or (isinstance(error, OSError) and error.errno == number):
                return os.strerror(number), _choose_file(error, path)
        is_torch = any(text in str(error) for text in _TORCH_WRITER)
        if is_torch and _measure(path).free < _NEARLY_FULL_BYTES:
            return os.strerror(errno.ENOSPC), path
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def _choose_file(error: BaseException, path: Path) -> Path:
    """On the file system of `path` that name says more than the error's, which may be a draft's."""
    name = error.filename if isinstance(error, OSError) else None
    if not isinstance(name, str | os.PathLike):
        return path
    file = Path(name)
    is_same = _find_existing(file).stat().st_dev == _find_existing(path).stat().st_dev
    return path if is_same else file


def describe_free_space(path: Path) -> str:
    usage = _measure(path)
    return f"{usage.free / 1e6:.1f} of {usage.total / 1e6:.1f} MB are free on its file system"


def _measure(path: Path) -> shutil._ntuple_diskusage:
    return shutil.disk_usage(_find_existing(path))


def _find_existing(path: Path) -> Path:
    """The path or the nearest folder above it that exists."""
    absolute = path.absolute()
    return next(folder for folder in (absolute, *absolute.parents) if folder.exists())
