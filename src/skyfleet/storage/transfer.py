"""Copy large files to and from buckets in parallel parts, with bounded memory and their hash.

At most `_PARTS` parts and the one being read are in memory. The SHA-256 of a transfer is computed from
the bytes that were sent or received, so that it proves what is in the bucket or on the disk.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from skyfleet.storage.objects import Place, open_place, read_range, stat_object
from skyfleet.storage.obstore_errors import explain_errors, import_obstore

if TYPE_CHECKING:
    from obstore import Bytes

_PARTS = 4
_PART_BYTES = 16 * 1024 * 1024
_READ_BYTES = 8 * 1024 * 1024
"""Each thread that reads keeps its freed part, so that a smaller one costs less."""
_STREAM_SECONDS = 4 * 3600
_MAX_PARTS = 10_000
"""S3's limit per object."""

Check = Callable[[], None]
"""Called between parts; raises to stop the transfer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transferred:
    size_bytes: int
    sha256: str


def upload_file(
    path: Path, address: str, *, checksum: bool = False, check: Check = lambda: None
) -> Transferred:
    """Replace an object by a file; a failed upload leaves the old object."""
    import_obstore()
    import obstore

    place = open_place(address, checksum=checksum)
    part_bytes = choose_part_bytes(path.stat().st_size)
    with path.open("rb") as file:
        source = _HashingReader(file, check)
        with explain_errors(address):
            try:
                obstore.put(
                    place.store,
                    place.key,
                    cast("Any", source),
                    use_multipart=path.stat().st_size > part_bytes,
                    chunk_size=part_bytes,
                    max_concurrency=_PARTS,
                )
            except Exception:
                if source.stopped is not None:
                    raise source.stopped from None
                raise
    return Transferred(size_bytes=source.size_bytes, sha256=source.digest.hexdigest())


def choose_part_bytes(size_bytes: int) -> int:
    return max(_PART_BYTES, -(-size_bytes // _MAX_PARTS))


def hash_object(address: str, *, check: Check = lambda: None) -> Transferred:
    """Read an object back and hash it."""
    digest, size_bytes = hashlib.sha256(), 0
    for part in _read_parts(address, check):
        digest.update(part)
        size_bytes += len(part)
    return Transferred(size_bytes=size_bytes, sha256=digest.hexdigest())


def download_file(address: str, path: Path, *, check: Check = lambda: None) -> Transferred:
    """Write an object to a new file; the caller checks the hash, and renames or removes the file."""
    digest, size_bytes = hashlib.sha256(), 0
    with path.open("wb") as file:
        for part in _read_parts(address, check):
            digest.update(part)
            file.write(part)
            size_bytes += len(part)
    return Transferred(size_bytes=size_bytes, sha256=digest.hexdigest())


def _read_parts(address: str, check: Check) -> Iterator[Bytes | bytes]:
    """The parts of an object in order, the next ones already on their way."""
    place, size_bytes = open_place(address), stat_object(address).size_bytes
    check()
    if size_bytes <= _READ_BYTES:
        with explain_errors(address):
            yield read_range(place, None)
    elif _serves_ranges(place):
        yield from _read_ranges(address, place, size_bytes, check)
    else:
        yield from _stream(address, check)


def _serves_ranges(place: Place) -> bool:
    """`rclone serve s3` answers a request for a range with status 200, which obstore rejects."""
    import obstore

    try:
        obstore.get_range(place.store, place.key, start=0, end=1)
    except Exception as error:
        # Any other error is reported by the requests that follow.
        return "non-partial response" not in str(error)
    return True


def _stream(address: str, check: Check) -> Iterator[bytes]:
    import obstore

    place = open_place(address, request_seconds=_STREAM_SECONDS)
    with explain_errors(address):
        for part in obstore.get(place.store, place.key).stream(min_chunk_size=_READ_BYTES):
            check()
            yield part


def _read_ranges(address: str, place: Place, size_bytes: int, check: Check) -> Iterator[Bytes]:
    spans = [
        (start, min(start + _READ_BYTES, size_bytes)) for start in range(0, size_bytes, _READ_BYTES)
    ]
    with ThreadPoolExecutor(_PARTS, thread_name_prefix="download") as pool:
        waiting: deque[Future[Bytes]] = deque()
        try:
            for span in spans:
                if len(waiting) == _PARTS:
                    yield _take(waiting, address, check)
                waiting.append(pool.submit(read_range, place, span))
            while waiting:
                yield _take(waiting, address, check)
        finally:
            for future in waiting:
                future.cancel()


def _take(waiting: deque[Future[Bytes]], address: str, check: Check) -> Bytes:
    check()
    with explain_errors(address):
        return waiting.popleft().result()


class _HashingReader(RawIOBase):
    """A file that hashes what is read from it, and stops when `check` raises."""

    def __init__(self, file: Any, check: Check) -> None:
        self._file, self._check = file, check
        self.digest = hashlib.sha256()
        self.size_bytes = 0
        self.stopped: BaseException | None = None

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        try:
            self._check()
        except BaseException as error:
            self.stopped = error
            raise
        data: bytes = self._file.read(size)
        self.digest.update(data)
        self.size_bytes += len(data)
        return data
