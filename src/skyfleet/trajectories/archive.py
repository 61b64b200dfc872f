"""Write and read trajectory archives: compressed files, appended to while others read them.

The episodes of a step are one `.jsonl.gz` file with one record per line, which any gzip reads. It
is written in gzip members of a few episodes. Each member is complete on disk before its lines
enter the index beside it, so a reader never sees half an episode and finds any episode without
reading the others.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from types import TracebackType

from skyfleet.storage.disk_full import explain_disk_full
from skyfleet.storage.local import make_folder, sync_folder
from skyfleet.trajectories.entry import COLUMNS, Entry, index_path, index_values
from skyfleet.trajectories.records import RecordError, encode_episode, from_record
from skyfleet.trajectories.trajectory import Group, Trajectory

logger = logging.getLogger(__name__)

SUFFIX = ".jsonl.gz"
_MEMBER_BYTES = 256 * 1024
"""Of text; this much is decompressed to read one episode."""
_FLUSH_SECONDS = 5.0
"""An episode is readable, and survives a crash of the process, after this long."""


def train_path(folder: Path, step: int) -> Path:
    """`train_path(run, 12)` is `run/train/step_000012.jsonl.gz`."""
    return folder / "train" / f"step_{step:06d}{SUFFIX}"


def eval_path(folder: Path, name: str, step: int) -> Path:
    """`eval_path(run, "held_out", 0)` is `run/eval/held_out/step_000000.jsonl.gz`."""
    return folder / "eval" / name.replace("/", "_") / f"step_{step:06d}{SUFFIX}"


def remove_episodes_after(folder: Path, last_step: int) -> None:
    """Remove the files of later steps, which a resumed run writes again."""
    for path in (*folder.glob(f"train/step_*{SUFFIX}"), *folder.glob(f"eval/*/step_*{SUFFIX}")):
        number = path.name.removeprefix("step_").removesuffix(SUFFIX)
        if number.isdecimal() and int(number) > last_step:
            for old in (index_path(path), path):
                old.unlink(missing_ok=True)


class EpisodeWriter:
    """Appends episodes to one file; a file of an earlier attempt is replaced."""

    def __init__(self, path: Path) -> None:
        make_folder(path.parent)
        # The index goes first: an index without its file is invalid, the reverse is only slow.
        for old in (index_path(path), path):
            old.unlink(missing_ok=True)
        self._path, self._files = path, ExitStack()
        with explain_disk_full(path):
            self._data = self._files.enter_context(path.open("ab"))
            self._index = self._files.enter_context(index_path(path).open("a", encoding="ascii"))
            self._index.write(json.dumps(COLUMNS) + "\n")
            self._index.flush()
        self._lines: list[bytes] = []
        self._pending: list[Trajectory] = []
        self._pending_bytes = 0
        self._flushed_at = monotonic()

    def add(self, trajectory: Trajectory, line: bytes | None = None) -> None:
        """`line` is what `encode_episode` returned for it, if that was called already."""
        line = (encode_episode(trajectory) if line is None else line) + b"\n"
        self._lines.append(line)
        self._pending.append(trajectory)
        self._pending_bytes += len(line)
        waited_seconds = monotonic() - self._flushed_at
        if self._pending_bytes >= _MEMBER_BYTES or waited_seconds >= _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Make everything added so far readable."""
        if not self._lines:
            return
        offset = self._data.tell()
        with explain_disk_full(self._path):
            self._data.write(gzip.compress(b"".join(self._lines), compresslevel=3, mtime=0))
            self._data.flush()
            for line, trajectory in enumerate(self._pending):
                self._index.write(json.dumps([*index_values(trajectory), offset, line]) + "\n")
            self._index.flush()
        self._lines, self._pending, self._pending_bytes = [], [], 0
        self._flushed_at = monotonic()

    def __enter__(self) -> EpisodeWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with explain_disk_full(self._path), self._files:
            self.flush()
            for file in (self._data, self._index):
                os.fsync(file.fileno())
            sync_folder(self._path.parent)


def write_groups(path: Path, groups: Sequence[Group]) -> None:
    """Write every attempt in the order of the groups."""
    with EpisodeWriter(path) as writer:
        for group in groups:
            for trajectory in group.trajectories:
                writer.add(trajectory)


def read_trajectories(path: Path) -> Iterator[Trajectory]:
    """Yield the episodes in the order written, up to where a crash truncated the file."""
    for offset, text in members(path):
        for line in text.splitlines():
            yield _parse(line, f"{path} at byte {offset}")


def load(entry: Entry) -> Trajectory:
    """Load one episode without reading the others."""
    for _, text in members(entry.path, start=entry.offset):
        return _parse(text.splitlines()[entry.line], entry.id)
    raise RecordError(f"{entry.path} ends before {entry.id}; copy the file again")


def members(path: Path, *, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and text of each member; a truncated last one is skipped with a warning."""
    with path.open("rb") as file:
        file.seek(start)
        chunk = file.read(_MEMBER_BYTES)
        while chunk:
            unpack, text, size = zlib.decompressobj(wbits=31), [], 0
            while chunk and not unpack.eof:
                try:
                    text.append(unpack.decompress(chunk))
                except zlib.error as error:
                    raise RecordError(
                        f"{path} at byte {start}: {error}; copy the file again"
                    ) from None
                size += len(chunk) - len(unpack.unused_data)
                chunk = unpack.unused_data or file.read(_MEMBER_BYTES)
            if not unpack.eof:
                logger.warning("%s is truncated at byte %d; the rest is skipped", path, start)
                return
            yield start, b"".join(text)
            start += size


def _parse(line: bytes, where: str) -> Trajectory:
    try:
        return from_record(json.loads(line))
    except ValueError as error:
        raise RecordError(f"{where}: {error}; copy the file again") from None
