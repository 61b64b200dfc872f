"""The archive keeps whole files, and reads what a crash left."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tests.trajectories.making import attempt, group

from skyfleet.trajectories.archive import eval_path, read_trajectories, train_path, write_groups
from skyfleet.trajectories.records import RecordError
from skyfleet.trajectories.trajectory import Group

GROUPS = [group([1.0, 0.0], task_key="a"), group([None], task_key="b", env_key="mail")]
ATTEMPTS = [trajectory for one in GROUPS for trajectory in one.trajectories]


def test_each_step_and_kind_has_its_file(tmp_path: Path) -> None:
    assert train_path(tmp_path, 12) == tmp_path / "train/step_000012.jsonl"
    assert eval_path(tmp_path, "held/out", 0) == tmp_path / "eval/held_out/step_000000.jsonl"


def test_what_is_written_is_read_in_order(tmp_path: Path) -> None:
    path = train_path(tmp_path, 1)
    write_groups(path, GROUPS)
    assert list(read_trajectories(path)) == ATTEMPTS
    assert list(path.parent.iterdir()) == [path]


def test_no_groups_are_an_empty_file(tmp_path: Path) -> None:
    write_groups(tmp_path / "x.jsonl", [])
    assert list(read_trajectories(tmp_path / "x.jsonl")) == []


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    write_groups(path, GROUPS)
    unwritable = attempt(1.0, task_key=b"not text")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="bytes"):
        write_groups(path, [Group(task_key="c", env_key="e", trajectories=(unwritable,))])
    assert list(read_trajectories(path)) == ATTEMPTS
    assert list(tmp_path.iterdir()) == [path]


def test_writing_again_is_a_new_file_for_whoever_still_reads_the_old(tmp_path: Path) -> None:
    path, old = tmp_path / "x.jsonl", tmp_path / "old.jsonl"
    write_groups(path, GROUPS)
    old.hardlink_to(path)
    write_groups(path, GROUPS[:1])
    assert list(read_trajectories(old)) == ATTEMPTS
    assert list(read_trajectories(path)) == ATTEMPTS[:2]


@pytest.mark.parametrize("kept_of_last_line", [1, 40, 100])
def test_a_torn_last_line_is_left_out_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kept_of_last_line: int
) -> None:
    path = tmp_path / "x.jsonl"
    write_groups(path, GROUPS)
    *whole, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole) + last[:kept_of_last_line])
    with caplog.at_level(logging.WARNING):
        assert list(read_trajectories(path)) == ATTEMPTS[:2]
    assert f"{path}:3 was cut short" in caplog.text


def test_a_broken_line_in_the_middle_names_its_place(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    write_groups(path, GROUPS)
    first, second, third = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:30] + b"\n" + third)
    with pytest.raises(RecordError, match=r"x\.jsonl:2: .*; copy the file again"):
        list(read_trajectories(path))


def test_a_line_of_another_version_names_its_place(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"version": 9}\n')
    with pytest.raises(RecordError, match=r"x\.jsonl:1: version=9"):
        list(read_trajectories(tmp_path / "x.jsonl"))
