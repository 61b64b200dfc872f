"""A segment returns what was recorded, bit by bit, and refuses what has changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.trajectories.making import attempt
from tests.trajectories.test_trajectory_records import FULL

from skyfleet.chat.transcript import Transcript
from skyfleet.trajectories.journal_segment import (
    JournalRecord,
    Place,
    SegmentWriter,
    decode_record,
    encode_record,
    read_segment,
)
from skyfleet.trajectories.records import RecordError, encode_episode
from skyfleet.trajectories.trajectory import Trajectory

PLACE = Place(1, 2, 3)


def record(episode: Trajectory = FULL, place: Place = PLACE) -> JournalRecord:
    return JournalRecord(
        run_id="a" * 32,
        step=7,
        policy_version=6,
        place=place,
        episode=episode,
        line=encode_episode(episode),
    )


def write(path: Path, *records: JournalRecord) -> None:
    writer = SegmentWriter(path)
    for one in records:
        writer.write(one)
    writer.sync()
    writer.close()


def read(path: Path) -> tuple[list[JournalRecord], list[str]]:
    damages: list[str] = []
    return list(read_segment(path, damages.append)), damages


ODD_LOGPROBS = replace(
    FULL,
    transcripts=(
        Transcript([1, 2, 3], [True] * 3, [-0.1, float("-inf"), -(2.0**-149)], [3, 4]),
        Transcript([1, 2], [True] * 2, [-1 / 3, -5e-324], [4]),
    ),
)


@pytest.mark.parametrize("episode", [FULL, attempt(None), attempt(1.0), ODD_LOGPROBS])
def test_a_record_returns_as_it_was(episode: Trajectory) -> None:
    line = encode_record(record(episode))
    assert line.count(b"\n") == 1
    assert decode_record(line[:-1]) == record(episode)


def test_a_record_with_any_changed_byte_is_refused() -> None:
    line = encode_record(record())[:-1]
    for at in range(len(line)):
        changed = line[:at] + bytes([line[at] ^ 1]) + line[at + 1 :]
        with pytest.raises(RecordError, match="checksum"):
            decode_record(changed)


def test_a_damaged_record_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "journal" / "step_000007.jsonl"
    first, second = record(place=Place(0, 0, 0)), record(place=Place(0, 0, 1))
    write(path, first, second, first)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1].replace(b"press", b"PRESS", 1) + lines[2])
    assert read(path) == ([first, first], [f"{path} line 2: the checksum is wrong"])


@pytest.mark.parametrize("torn_bytes", [1, 100, 1000])
def test_a_torn_last_record_is_dropped_and_the_next_one_begins_a_line(
    tmp_path: Path, torn_bytes: int
) -> None:
    path = tmp_path / "step_000007.jsonl"
    write(path, record(place=Place(0, 0, 0)))
    with path.open("ab") as file:
        file.write(encode_record(record())[:torn_bytes])
    assert read(path) == ([record(place=Place(0, 0, 0))], [])
    write(path, record(place=Place(0, 1, 0)))
    assert read(path) == ([record(place=Place(0, 0, 0)), record(place=Place(0, 1, 0))], [])
