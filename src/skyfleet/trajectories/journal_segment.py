"""A segment of the journal: the finished episodes of one training step, one checked line each.

A line is JSON: `{"sha256":"…","record":{…,"episode":{…}}}`. The checksum is that of the bytes of
`record`, and `episode` is the line that the trajectory archive stores. Lines are appended as
episodes finish, in any order; of two lines with the same place the last one counts.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from skyfleet.storage.disk_full import explain_disk_full
from skyfleet.storage.local import make_folder, sync_folder
from skyfleet.trajectories.records import RecordError, from_record
from skyfleet.trajectories.trajectory import Trajectory

VERSION = 1
"""Of the record around an episode; the episode has a version of its own."""

_BEFORE_SUM, _BEFORE_RECORD, _BEFORE_EPISODE = b'{"sha256":"', b'","record":', b',"episode":'
_SUM_END = len(_BEFORE_SUM) + hashlib.sha256().digest_size * 2
_RECORD_START = _SUM_END + len(_BEFORE_RECORD)


class Place(NamedTuple):
    """Where an episode belongs in the step's rollouts."""

    batch: int
    """Dynamic sampling rolls out several batches per step."""
    group: int
    """The position of its group in the batch."""
    sample: int
    """The index of the attempt in its group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalRecord:
    run_id: str
    step: int
    """The step for which the episode was collected."""
    policy_version: int
    """The weights with which its batch was begun."""
    place: Place
    episode: Trajectory
    line: bytes
    """The episode as the trajectory archive stores it, without the newline."""


def encode_record(record: JournalRecord) -> bytes:
    header: dict[str, Any] = {
        "version": VERSION,
        "run_id": record.run_id,
        "step": record.step,
        "policy_version": record.policy_version,
        **record.place._asdict(),
        "task_key": record.episode.task_key,
        "env_key": record.episode.env_key,
    }
    # The episode was encoded for the archive already: a second time would cost more than the rest.
    head = json.dumps(header, separators=(",", ":")).encode("ascii")[:-1]
    digest = hashlib.sha256(head)
    for part in (_BEFORE_EPISODE, record.line, b"}"):
        digest.update(part)
    checksum = digest.hexdigest().encode("ascii")
    parts = (_BEFORE_SUM, checksum, _BEFORE_RECORD, head, _BEFORE_EPISODE, record.line, b"}}\n")
    return b"".join(parts)


def decode_record(line: bytes) -> JournalRecord:
    """The record of a line without its newline; RecordError if a byte of it has changed."""
    record = line[_RECORD_START:-1]
    checksum = hashlib.sha256(record).hexdigest().encode("ascii")
    if line != b"".join((_BEFORE_SUM, checksum, _BEFORE_RECORD, record, b"}")):
        raise RecordError("the checksum is wrong")
    values = json.loads(record)
    if (version := values["version"]) != VERSION:
        raise RecordError(f"version={version!r}; this skyfleet reads version {VERSION}")
    return JournalRecord(
        run_id=values["run_id"],
        step=values["step"],
        policy_version=values["policy_version"],
        place=Place(values["batch"], values["group"], values["sample"]),
        episode=from_record(values["episode"]),
        line=record[record.index(_BEFORE_EPISODE) + len(_BEFORE_EPISODE) : -1],
    )


def read_segment(path: Path, on_damage: Callable[[str], None]) -> Iterator[JournalRecord]:
    """Yield the intact records; `on_damage` gets a sentence about each other one.

    The last line of a process that was killed while it wrote has no newline: it is skipped silently.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = decode_record(line[:-1])
            except (RecordError, ValueError, KeyError) as error:
                on_damage(f"{path} line {number}: {error}")
            else:
                yield record


class SegmentWriter:
    """Appends records to a segment, which is created by the first of them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._is_synced = True

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def write(self, record: JournalRecord) -> None:
        """From here on the episode survives the death of this process."""
        with explain_disk_full(self._path):
            if self._file is None:
                self._file = self._open()
            self._is_synced = False
            self._file.write(encode_record(record))
            self._file.flush()

    def sync(self) -> None:
        """From here on everything written survives a power failure."""
        if self._file is not None and not self._is_synced:
            self._is_synced = True  # before: a record may be written while this runs in a thread
            with explain_disk_full(self._path):
                os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            with explain_disk_full(self._path):
                self._file.close()

    def _open(self) -> BinaryIO:
        make_folder(self._path.parent)
        _drop_torn_line(self._path)
        file = self._path.open("ab")
        sync_folder(self._path.parent)
        return file


def _drop_torn_line(path: Path) -> None:
    """Remove what follows the last newline, or the next record would be part of it."""
    if path.exists():
        with path.open("r+b") as file:
            file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))
