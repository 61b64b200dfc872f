"""A full disk is one sentence, whichever library met it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from skyfleet.checkpoints.saving import save_checkpoint
from skyfleet.errors import CheckpointError, DiskFullError
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


def test_a_file_on_another_file_system_is_named_instead(tmp_path: Path) -> None:
    elsewhere = pytest.raises(DiskFullError, match=r"^/dev/shm/torch_1 was not written: No space")
    with elsewhere, explain_disk_full(tmp_path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/dev/shm/torch_1")
    here = pytest.raises(DiskFullError, match=rf"^{tmp_path}/a was not written: No space")
    with here, explain_disk_full(tmp_path / "a"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / ".a.draft"))


def test_a_full_disk_that_was_handled_is_not_the_cause(tmp_path: Path) -> None:
    def recover() -> None:
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            raise ValueError("another mistake") from None

    with pytest.raises(ValueError, match="another mistake"), explain_disk_full(tmp_path):
        recover()


def test_a_checkpoint_that_was_not_saved_keeps_its_own_sentence(tmp_path: Path) -> None:
    class Full:
        def save(self, folder: Path) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def load(self, folder: Path) -> None: ...

    sentence = "global_step_3 was not saved: No space left on device .*there is no earlier"
    with pytest.raises(CheckpointError, match=sentence), explain_disk_full(tmp_path):
        save_checkpoint(tmp_path, 3, {"policy": Full()})


def test_other_errors_pass_unchanged(tmp_path: Path) -> None:
    error = OSError(errno.EIO, "Input/output error")
    with pytest.raises(OSError, match="Input/output") as caught, explain_disk_full(tmp_path):
        raise error
    assert caught.value is error
    # The text alone is not enough: an environment may quote another machine's error.
    with pytest.raises(RuntimeError, match="No space"), explain_disk_full(tmp_path):
        raise RuntimeError("the server answered: No space left on device")
