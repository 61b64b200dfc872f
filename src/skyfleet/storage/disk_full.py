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
    """Raise DiskFullError with `path` if the block fails because its file system is full.

    An OSError of a broken disk that names no file gets `path`.
    """
    try:
        yield
    except (DiskFullError, CheckpointError):
        raise  # a sentence already
    except Exception as error:
        if (cause := find_disk_full(error, path)) is None:
            if isinstance(error, OSError) and not error.filename and error.errno in _BROKEN:
                error.filename = str(path)
            raise
        raise DiskFullError(path, f"{cause} ({describe_free_space(path)})") from error


def find_disk_full(error: BaseException | None, path: Path) -> str | None:
    """`No space left on device` or `Disk quota exceeded` if that caused the error."""
    while error is not None:
        for number in _FULL:
            named = type(error).__name__ == _RUST_ERROR and os.strerror(number) in str(error)
            if named or (isinstance(error, OSError) and error.errno == number):
                return os.strerror(number)
        is_torch = any(text in str(error) for text in _TORCH_WRITER)
        if is_torch and _measure(path).free < _NEARLY_FULL_BYTES:
            return os.strerror(errno.ENOSPC)
        error = error.__cause__ or error.__context__
    return None


def describe_free_space(path: Path) -> str:
    usage = _measure(path)
    return f"{usage.free / 1e6:.1f} of {usage.total / 1e6:.1f} MB are free on its file system"


def _measure(path: Path) -> shutil._ntuple_diskusage:
    absolute = path.absolute()
    existing = next(folder for folder in (absolute, *absolute.parents) if folder.exists())
    return shutil.disk_usage(existing)
