"""BucketLock: one process at a time uploads under an address.

An object at the address names the process and changes with every heartbeat. A process that finds the
record of another one waits to see whether it still changes, unless the other ran here and has ended;
clocks play no part. The record is created and replaced on the condition that nobody else did. Where a
server ignores the condition, one of two processes finds the other's record at its next heartbeat.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from threading import Event, Lock, Thread

from skyfleet.errors import CheckpointError, ConfigError
from skyfleet.storage.lock_owner import Owner, parse_owner
from skyfleet.storage.objects import delete_object, join
from skyfleet.storage.versions import Version, read_version, replace_version

logger = logging.getLogger(__name__)

OWNER = "owner.json"
HEARTBEAT_SECONDS = 15.0
WAIT_SECONDS = 40.0
"""Two heartbeats and a slow request."""
_POLLS = 20
_RELEASE_SECONDS = 10.0

_held: set[str] = set()
"""The tokens of this process."""


class BucketLock:
    def __init__(self, address: str) -> None:
        self._address, self._object = address, join(address, OWNER)
        self._owner = Owner.describe_this_process()
        self._released, self._writing = Event(), Lock()
        self._taken_by: Owner | None = None

    async def acquire(self, on_wait: Callable[[str], None]) -> None:
        """Raise ConfigError if another process uploads here."""
        found, version = self._read()
        if found is not None and not _has_ended(found):
            if found.is_visible():
                raise ConfigError(self._describe_in_use(found))
            version = await self._wait_for_heartbeat(found, on_wait)
        _held.add(self._owner.token)
        is_ours = False
        try:
            is_ours = replace_version(self._object, self._format_owner(), version)
            # A request that was answered too late is repeated, and finds its own record.
            is_ours = is_ours or self._is_recorded()
        finally:
            if not is_ours:
                _held.discard(self._owner.token)
        if not is_ours:
            raise ConfigError(self._describe_in_use(self._read()[0]))
        Thread(target=self._beat, name="skyfleet bucket lock", daemon=True).start()

    def release(self) -> None:
        """Remove the record; a server that does not answer must not delay the end of the process."""
        self._released.set()
        _held.discard(self._owner.token)
        removal = Thread(target=self._remove, name="skyfleet bucket lock", daemon=True)
        removal.start()
        removal.join(_RELEASE_SECONDS)

    def check(self) -> None:
        """Raise if another process took over, as of the last heartbeat."""
        if self._taken_by is not None:
            raise CheckpointError(
                f"{self._address} was taken over by {self._taken_by.describe()}, so this process "
                "stops uploading there; stop one of the two"
            )

    async def _wait_for_heartbeat(
        self, found: Owner, on_wait: Callable[[str], None]
    ) -> Version | None:
        """The version of the record that does not change; None if it was removed meanwhile."""
        on_wait(
            f"{self._address} was left by {found.describe()}: waiting {WAIT_SECONDS:.0f} seconds to "
            "see whether it still uploads"
        )
        version: Version | None = None
        for _ in range(_POLLS):
            await asyncio.sleep(WAIT_SECONDS / _POLLS)
            owner, version = self._read()
            if version is None:
                return None
            if owner != found:
                raise ConfigError(self._describe_in_use(owner))
        logger.warning("%s is taken over from %s", self._address, found.describe())
        return version

    def _read(self) -> tuple[Owner | None, Version | None]:
        """The record and its version; None and a version for what is not a record."""
        found = read_version(self._object)
        return (None, None) if found is None else (parse_owner(found[0]), found[1])

    def _format_owner(self) -> bytes:
        return self._owner.model_dump_json().encode() + b"\n"

    def _is_recorded(self) -> bool:
        owner, _ = self._read()
        return owner is not None and owner.token == self._owner.token

    def _remove(self) -> None:
        with self._writing, suppress(OSError):  # a record that stays is found not to change
            if self._is_recorded():
                delete_object(self._object)

    def _beat(self) -> None:
        while not self._released.wait(HEARTBEAT_SECONDS):
            with self._writing, suppress(OSError):  # the next beat may succeed
                if self._released.is_set():
                    return
                owner, version = self._read()
                if owner is not None and owner.token != self._owner.token:
                    self._taken_by = owner
                    return
                self._owner = self._owner.model_copy(
                    update={"heartbeat": self._owner.heartbeat + 1}
                )
                replace_version(self._object, self._format_owner(), version)

    def _describe_in_use(self, owner: Owner | None) -> str:
        who = owner.describe() if owner else "another process"
        return (
            f"{self._address} is in use by another run ({who}); wait until it ends or stop it, or "
            "give trainer.run_name (run_dir= in Python) another name"
        )


@asynccontextmanager
async def lock_addresses(
    addresses: Sequence[str], on_wait: Callable[[str], None] = lambda _: None
) -> AsyncIterator[list[BucketLock]]:
    """Hold the locks of all addresses, or none; what a lost machine left is waited for once."""
    locks, held = [BucketLock(address) for address in addresses], list[BucketLock]()

    async def acquire(lock: BucketLock) -> None:
        await lock.acquire(on_wait)
        held.append(lock)

    try:
        for result in await asyncio.gather(*map(acquire, locks), return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
        yield locks
    finally:
        for lock in held:
            lock.release()


def _has_ended(owner: Owner) -> bool:
    if owner.is_visible() and owner.pid == os.getpid():
        return owner.token not in _held
    return owner.has_ended()
