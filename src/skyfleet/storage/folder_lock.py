"""FolderLock: one process at a time writes to a folder, and its lock ends with the process.

The kernel releases the lock when its process ends, however it ends; NFS and most cluster file
systems also show it to other machines. Where they do not, a heartbeat in the lock file does: a
process that finds the record of another one waits to see whether it still changes, unless the other
ran here and has ended.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import cache
from pathlib import Path
from threading import Event, Lock, Thread
from weakref import WeakSet

from skyfleet.errors import CheckpointError, ConfigError
from skyfleet.storage.disk_full import explain_disk_full
from skyfleet.storage.local import make_folder
from skyfleet.storage.lock_owner import Owner, parse_owner, read_owner
from skyfleet.storage.working_directory import anchor_path

logger = logging.getLogger(__name__)

LOCK = ".lock"
HEARTBEAT_SECONDS = 10.0
WAIT_SECONDS = 25.0
"""Two heartbeats and the delay of a network file system."""
_POLLS = 25
_RETRIES, _RETRY_SECONDS = 5, 0.1
"""A dry run holds a shared lock for an instant to see whether the folder is in use."""
_REFUSED = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG}
)
"""What a wrong path fails with, unlike a broken disk."""
_UNSUPPORTED = frozenset({errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL})


class FolderLock:
    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, anchor_path(folder / LOCK)
        self._owner = Owner.describe_this_process()
        self._created: Sequence[Path] = ()
        self._file: int | None = None
        self._released, self._writing = Event(), Lock()

    @property
    def token(self) -> str:
        return self._owner.token

    async def acquire(self, on_wait: Callable[[str], None]) -> None:
        """Raise ConfigError if another process holds the lock; creates the folder."""
        self._created = [p for p in self._path.parents if not p.exists()]
        is_ours = False
        try:
            with explain_disk_full(self._path):
                make_folder(self._folder)
                found = await self._open()
                if found is not None and not _has_ended(found):
                    await self._wait_for_heartbeat(found, on_wait)
                is_ours = True
                self._write_owner()
            Thread(target=self._beat, name="skyfleet lock", daemon=True).start()
        except OSError as error:
            self._close(remove=is_ours)
            if error.errno not in _REFUSED:
                raise
            raise ConfigError(
                f"{self._folder} cannot be written: {error.strerror or error}; choose another folder with "
                "trainer.run_path and trainer.ckpt_path (run_dir= in Python), or change its permissions"
            ) from None
        except BaseException:
            self._close(remove=is_ours)
            raise

    def release(self) -> None:
        """Remove the lock file, and the folders that `acquire` created if nothing is in them."""
        self._released.set()
        # Where locks are local to a mount, another process may have taken over the same file.
        self._close(remove=self._find_other_owner() is None)

    def check(self) -> None:
        """Raise if another process took the lock: the file was removed, or the network failed."""
        if owner := self._find_other_owner():
            raise CheckpointError(
                f"{self._folder} was taken over by {owner.describe()}, so this process stops "
                "without writing to it; stop one of the two"
            )

    def close_in_child(self) -> None:
        """A forked process must not hold the lock after its parent has ended."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    async def _open(self) -> Owner | None:
        """Lock the file. Returns the record in it, which a killed process leaves."""
        for _ in range(_RETRIES):
            file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                # Its previous owner may have removed the file since it was opened.
                if _try_lock(file) and _is_same_file(file, self._path):
                    self._file, file = file, -1
                    _held.add(self)
                    return read_owner(self._path)
            finally:
                if file >= 0:
                    os.close(file)
            await asyncio.sleep(_RETRY_SECONDS)
        raise ConfigError(_describe_in_use(self._folder, read_owner(self._path)))

    async def _wait_for_heartbeat(self, found: Owner, on_wait: Callable[[str], None]) -> None:
        """The record of a killed process stays as it is; that of a live one changes."""
        on_wait(
            f"{self._folder} was left by {found.describe()}: waiting {WAIT_SECONDS:.0f} seconds to "
            "see whether it still runs"
        )
        for _ in range(_POLLS):
            await asyncio.sleep(WAIT_SECONDS / _POLLS)
            # Opened anew each time: a network file system refreshes a file when it is opened.
            if (owner := read_owner(self._path)) is not None and owner != found:
                raise ConfigError(_describe_in_use(self._folder, owner))
        assert self._file is not None
        if not _is_same_file(self._file, self._path):
            # It ended meanwhile and removed the file, so this process holds the lock of no file.
            os.close(self._file)
            self._file = None
            if (owner := await self._open()) is not None:
                raise ConfigError(_describe_in_use(self._folder, owner))

    def _find_other_owner(self) -> Owner | None:
        owner = read_owner(self._path)
        return owner if owner is not None and owner.token != self._owner.token else None

    def _write_owner(self) -> None:
        assert self._file is not None
        data = self._owner.model_dump_json().encode() + b"\n"
        os.pwrite(self._file, data, 0)
        os.ftruncate(self._file, len(data))
        os.fsync(self._file)

    def _beat(self) -> None:
        while not self._released.wait(HEARTBEAT_SECONDS):
            self._owner = self._owner.model_copy(update={"heartbeat": self._owner.heartbeat + 1})
            # A closed descriptor may be another file's, so it is not closed while it is written.
            with self._writing, suppress(OSError):  # the next beat may succeed
                if self._file is None or self._find_other_owner():
                    return
                # Code in this process may have closed the descriptor, which is another file's now.
                if not _is_same_file(self._file, self._path):
                    continue
                self._write_owner()

    def _close(self, *, remove: bool) -> None:
        if self._file is None:
            self._remove_created()
            return
        if remove and _is_same_file(self._file, self._path):
            with suppress(OSError):
                self._path.unlink()
        with self._writing:
            file, self._file = self._file, None
            os.close(file)
        _held.discard(self)
        self._remove_created()

    def _remove_created(self) -> None:
        for folder in self._created:
            with suppress(OSError):  # something is in it
                folder.rmdir()


@asynccontextmanager
async def lock_folders(
    folders: Sequence[Path], on_wait: Callable[[str], None] = lambda _: None
) -> AsyncIterator[list[FolderLock]]:
    """Hold the locks of several folders; none of them if one is in use."""
    async with AsyncExitStack() as held:
        locks = []
        for folder in folders:
            lock = FolderLock(folder)
            await lock.acquire(on_wait)
            held.callback(lock.release)
            locks.append(lock)
        yield locks


def check_not_in_use(folder: Path) -> None:
    """Raise ConfigError if a process holds the folder's lock; changes nothing."""
    try:
        file = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:
        return
    try:
        locked = _try_lock(file, shared=True)
    finally:
        os.close(file)
    if not locked:
        raise ConfigError(_describe_in_use(folder, read_owner(folder / LOCK)))


_held: WeakSet[FolderLock] = WeakSet()


def _close_in_child() -> None:
    for lock in list(_held):
        lock.close_in_child()
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


def _has_ended(owner: Owner) -> bool:
    if owner.is_visible() and owner.pid == os.getpid():
        return owner.token not in {lock.token for lock in _held}
    return owner.has_ended()


def _try_lock(file: int, *, shared: bool = False) -> bool:
    """False if another process holds it; True also where the file system has no locks."""
    # flock, not lockf: a POSIX lock is lost when any code of the process closes the file once.
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return _has_no_live_owner(file)
    return True


def _has_no_live_owner(file: int) -> bool:
    """Without kernel locks: whether the recorded process has ended, or its heartbeat must decide."""
    _warn_unsupported()
    owner = parse_owner(os.pread(file, 4096, 0))
    return owner is None or not owner.is_visible() or _has_ended(owner)


@cache
def _warn_unsupported() -> None:
    logger.warning(
        "the file system of the run folder does not support locks, so two runs are distinguished by "
        "process id and heartbeat only; start at most one run per folder"
    )


def _describe_in_use(folder: Path, owner: Owner | None) -> str:
    who = owner.describe() if owner else "another process"
    return (
        f"{folder} is in use by another run ({who}); wait until it ends or stop it, or give "
        "trainer.run_name (run_dir= in Python) another name"
    )


def _is_same_file(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except OSError:
        return False
