"""Standard output and error that outlast user code which closes or removes them.

An environment runs in this process: `sys.stdout.close()` or `sys.stdout = None` in one of its
methods must not end the run with an error of whoever prints next.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TextIO, cast


@dataclass(slots=True, kw_only=True)
class _Remembered:
    stream: TextIO
    fd: int | None
    """A copy of its file descriptor, which may be closed or belong to another file later."""
    is_reopened: bool = False
    """The stream writes to the copy."""


_remembered: dict[str, _Remembered] = {}


def remember_streams() -> None:
    """Note where standard output and error go now; call it before user code runs."""
    for name in ("stdout", "stderr"):
        stream, old = getattr(sys, name), _remembered.get(name)
        if not _is_open(stream) or (old is not None and old.stream is stream):
            continue
        if old is not None and old.fd is not None and not old.is_reopened:
            os.close(old.fd)
        _remembered[name] = _Remembered(stream=stream, fd=_copy_descriptor(stream))


def restore_streams() -> None:
    """Replace `sys.stdout` and `sys.stderr` if they were closed or removed since they were noted."""
    if not _is_open(sys.stdout):
        sys.stdout = _reopen("stdout")
    if not _is_open(sys.stderr):
        sys.stderr = _reopen("stderr")


def open_stdout() -> TextIO:
    """Standard output; one that discards its text if the process has none."""
    restore_streams()
    return sys.stdout


def make_lasting(stream: TextIO) -> TextIO:
    """A stream that writes to `stream`, or to standard output once somebody has closed that."""
    return cast("TextIO", _LastingStream(stream))


class _LastingStream(io.TextIOBase):
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def _find_open(self) -> TextIO:
        if not _is_open(self._stream):
            self._stream = open_stdout()
        return self._stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._find_open().encoding

    def write(self, text: str) -> int:
        return self._find_open().write(text)

    def flush(self) -> None:
        self._find_open().flush()

    def isatty(self) -> bool:
        return self._find_open().isatty()

    def fileno(self) -> int:
        return self._find_open().fileno()

    def close(self) -> None:
        """The stream belongs to others."""


class _NoStream(io.TextIOBase):
    """Discards its text."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        return len(text)


def _is_open(stream: object) -> bool:
    return stream is not None and not getattr(stream, "closed", False)


def _reopen(name: str) -> TextIO:
    old = _remembered.get(name)
    if old is not None and _is_open(old.stream):
        return old.stream
    # `sys.__stdout__` may write to the same descriptor, or to one that belongs to another file now.
    if old is not None and old.fd is not None:
        old.is_reopened = True
        old.stream = open(  # noqa: SIM115 - standard output stays open
            old.fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
        )
        return old.stream
    return cast("TextIO", _NoStream())


def _copy_descriptor(stream: TextIO) -> int | None:
    with suppress(OSError, ValueError, AttributeError):
        return os.dup(stream.fileno())
    return None
