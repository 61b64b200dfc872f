"""A full disk is one sentence, whichever library met it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from skyfleet.errors import DiskFullError
from skyfleet.storage.disk_full import explain_disk_full


def test_a_full_device_names_the_file_and_the_free_space() -> None:
    sentence = (
        r"^/dev/full was not written: No space left on device \([\d.]+ of [\d.]+ MB are free on its "
        r"file system\); free some space and run the same command again: what was written before"
    )
    with pytest.raises(DiskFullError, match=sentence), explain_disk_full(Path("/dev/full")):
        Path("/dev/full").write_text("x")


def test_a_used_up_quota_is_named(tmp_path: Path) -> None:
    with pytest.raises(DiskFullError, match="Disk quota exceeded"), explain_disk_full(tmp_path):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


def test_other_errors_pass_unchanged(tmp_path: Path) -> None:
    error = OSError(errno.EIO, "Input/output error")
    with pytest.raises(OSError, match="Input/output") as caught, explain_disk_full(tmp_path):
        raise error
    assert caught.value is error
    # The text alone is not enough: an environment may quote another machine's error.
    with pytest.raises(RuntimeError, match="No space"), explain_disk_full(tmp_path):
        raise RuntimeError("the server answered: No space left on device")
