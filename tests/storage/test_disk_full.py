"""A full disk is one sentence, whichever library met it."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from skyfleet.errors import CheckpointError, DiskFullError
from skyfleet.storage.disk_full import explain_disk_full
from skyfleet.storage.folder_lock import FolderLock
from skyfleet.storage.local import make_folder, write_atomically
from skyfleet.tracking.jsonl_tracker import JsonlTracker
from skyfleet.trajectories.archive import write_groups


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


async def _hold_lock(folder: Path) -> None:
    await FolderLock(folder).acquire(lambda _: None)


WRITERS: dict[str, Callable[[Path], object]] = {
    "a file": lambda folder: write_atomically(folder / "config.yaml", b"x"),
    "a folder": lambda folder: make_folder(folder / "checkpoints"),
    "a lock": lambda folder: asyncio.run(_hold_lock(folder)),
    "a row": lambda folder: JsonlTracker(folder, resume_step=None).sync(),
    "an episode": lambda folder: write_groups(folder / "step.jsonl.gz", ()),
}


@pytest.mark.parametrize("name", WRITERS)
def test_an_fsync_that_fails_names_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def fail(file: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))  # the system names no file

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error") as caught:
        WRITERS[name](tmp_path)
    # With a name the command line prints one sentence, without one a traceback.
    assert Path(str(caught.value.filename)).is_relative_to(tmp_path)


def test_an_error_of_a_connection_gets_no_file_name(tmp_path: Path) -> None:
    with pytest.raises(ConnectionResetError) as caught, explain_disk_full(tmp_path):
        raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
    assert caught.value.filename is None


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


def test_other_errors_pass_unchanged(tmp_path: Path) -> None:
    error = OSError(errno.EIO, "Input/output error")
    with pytest.raises(OSError, match="Input/output") as caught, explain_disk_full(tmp_path):
        raise error
    assert caught.value is error
    # The text alone is not enough: an environment may quote another machine's error.
    with pytest.raises(RuntimeError, match="No space"), explain_disk_full(tmp_path):
        raise RuntimeError("the server answered: No space left on device")


def test_the_sentence_of_a_checkpoint_that_was_not_saved_stays(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="global_step_1 is intact"):  # noqa: SIM117
        with explain_disk_full(tmp_path):
            raise CheckpointError("global_step_1 is intact") from OSError(errno.ENOSPC, "full")
