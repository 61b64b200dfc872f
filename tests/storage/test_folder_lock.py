"""One process at a time writes to a folder, whatever happened to the one before."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from time import sleep

import pytest

from skyfleet.errors import CheckpointError, ConfigError
from skyfleet.storage import folder_lock, lock_owner
from skyfleet.storage.folder_lock import LOCK, FolderLock, check_not_in_use, lock_folders
from skyfleet.storage.lock_owner import Owner

HOLDER = """
import asyncio, sys, time
from pathlib import Path
from skyfleet.storage.folder_lock import FolderLock

lock = FolderLock(Path(sys.argv[1]))
asyncio.run(lock.acquire(print))
print("locked", flush=True)
time.sleep(60)
"""


def try_lock(*folders: Path) -> list[str]:
    """Lock and release; returns what it announced."""
    notes: list[str] = []

    async def lock() -> None:
        async with lock_folders(folders, notes.append):
            pass

    asyncio.run(lock())
    return notes


@contextmanager
def hold(folder: Path) -> Iterator[FolderLock]:
    lock = FolderLock(folder)
    asyncio.run(lock.acquire(print))
    yield lock
    lock.release()


def elsewhere(**changes: object) -> Owner:
    owner = Owner.describe_this_process()
    return owner.model_copy(update={"host": "node7", "boot_id": "b", "token": "t", **changes})


def test_the_lock_of_a_killed_process_ends_with_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        sentence = rf"is in use by another run \(process {holder.pid} on .*, since 20.*; wait until"
        with pytest.raises(ConfigError, match=sentence):
            try_lock(tmp_path)
        with pytest.raises(ConfigError, match=sentence):
            check_not_in_use(tmp_path)
        holder.kill()
    check_not_in_use(tmp_path)
    assert try_lock(tmp_path) == []


def test_a_lock_leaves_no_file_and_no_folder_that_it_created(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "new"
    with hold(folder):
        assert (folder / LOCK).exists()
        with pytest.raises(ConfigError, match=f"process {os.getpid()}"):
            try_lock(folder)
    assert list(tmp_path.iterdir()) == []


def test_no_folder_is_locked_if_one_of_them_is_in_use(tmp_path: Path) -> None:
    with hold(tmp_path / "b"):
        with pytest.raises(ConfigError, match="in use"):
            try_lock(tmp_path / "a", tmp_path / "b")
        assert [path.name for path in tmp_path.iterdir()] == ["b"]


HERE = Owner.describe_this_process()
OTHERS = {
    "another machine": {},
    "another machine of the same name": {"host": HERE.host},
    "another container": {"boot_id": HERE.boot_id, "pid_namespace": "pid:[1]"},
    "a process of this machine": {
        **HERE.model_dump(exclude={"token", "host"}),
        "pid": os.getppid(),
        "process_start": lock_owner._read_process_start(os.getppid()),
    },
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("is_alive", [False, True])
def test_the_heartbeat_decides_where_the_lock_of_another_process_is_not_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_alive: bool, other: str
) -> None:
    monkeypatch.setattr(folder_lock, "WAIT_SECONDS", 0.2)
    record = elsewhere(**OTHERS[other])
    host = record.host
    (tmp_path / LOCK).write_text(record.model_dump_json())
    ended = Event()

    def beat() -> None:
        number = 0
        while not ended.wait(0.02):
            number += 1
            beaten = record.model_copy(update={"heartbeat": number})
            (tmp_path / LOCK).write_text(beaten.model_dump_json())

    thread = Thread(target=beat)
    if is_alive:
        thread.start()
        with pytest.raises(ConfigError, match=rf"in use by another run .*on {host}"):
            try_lock(tmp_path)
        ended.set()
        thread.join()
        assert (tmp_path / LOCK).exists()
    else:
        (note,) = try_lock(tmp_path)
        assert f"on {host}, since" in note
        assert "to see whether it still runs" in note


def test_a_lock_that_its_owner_removed_meanwhile_is_taken_as_a_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_lock, "WAIT_SECONDS", 0.2)
    (tmp_path / LOCK).write_text(elsewhere().model_dump_json())
    lock = FolderLock(tmp_path)
    asyncio.run(lock.acquire(lambda _: (tmp_path / LOCK).unlink()))
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    lock.release()
    assert not (tmp_path / LOCK).exists()


def test_a_folder_that_cannot_be_written_is_named_with_its_key(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as raised:
        asyncio.run(FolderLock(tmp_path / "file" / "run").acquire(lambda _: None))
    assert "file/run cannot be written: Not a directory; choose another folder" in str(raised.value)
    assert "trainer.run_path" in str(raised.value)


def test_the_owner_writes_a_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "HEARTBEAT_SECONDS", 0.01)
    with hold(tmp_path):
        before = (tmp_path / LOCK).read_text()
        for _ in range(1000):
            if (tmp_path / LOCK).read_text() != before:
                break
            sleep(0.01)
        assert (tmp_path / LOCK).read_text() != before


def test_a_process_that_lost_its_folder_stops_before_it_saves(tmp_path: Path) -> None:
    with hold(tmp_path) as lock:
        lock.check()
        (tmp_path / LOCK).unlink()
        lock.check()
        (tmp_path / LOCK).write_text(elsewhere().model_dump_json())
        with pytest.raises(CheckpointError, match=r"was taken over by process .* on node7"):
            lock.check()
    assert (tmp_path / LOCK).exists()


def test_the_record_of_a_process_that_took_over_the_same_file_stays(tmp_path: Path) -> None:
    with hold(tmp_path):
        (tmp_path / LOCK).write_text(elsewhere().model_dump_json())
    assert (tmp_path / LOCK).exists()


def test_without_kernel_locks_the_process_of_this_machine_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    folder_lock._warn_unsupported.cache_clear()
    with hold(tmp_path):
        assert "does not support locks" in caplog.text
        with pytest.raises(ConfigError, match="in use"):
            try_lock(tmp_path)
    ended = Owner.describe_this_process().model_copy(update={"process_start": "1"})
    (tmp_path / LOCK).write_text(ended.model_dump_json())
    assert try_lock(tmp_path) == []


def test_a_forked_process_does_not_hold_the_lock_of_its_parent(tmp_path: Path) -> None:
    script = """
import asyncio, os, sys, time
from pathlib import Path
from skyfleet.storage.folder_lock import FolderLock

lock = FolderLock(Path(sys.argv[1]))
asyncio.run(lock.acquire(print))
if os.fork() == 0:
    os.close(1)
    time.sleep(5)
    os._exit(0)
print("forked", flush=True)
os.kill(os.getpid(), 9)
"""
    command = [sys.executable, "-W", "ignore", "-c", script, str(tmp_path)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    assert ended.stdout == "forked\n"
    assert try_lock(tmp_path) == []


def test_a_lock_whose_thread_cannot_start_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr("skyfleet.storage.folder_lock.Thread.start", fail)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            try_lock(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
    assert try_lock(tmp_path / "run") == []
