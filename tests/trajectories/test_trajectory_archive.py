"""The archive is readable while it grows and after a crash."""

from __future__ import annotations

import gzip
import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
from tests.trajectories.making import attempt, call_turn, group, played, transcript

from skyfleet.chat.message import Message
from skyfleet.metrics.rollout_metrics import episode_metrics
from skyfleet.trajectories.archive import (
    EpisodeWriter,
    eval_path,
    load,
    members,
    read_trajectories,
    train_path,
    write_groups,
)
from skyfleet.trajectories.entry import COLUMNS, index_path, index_values
from skyfleet.trajectories.index import find_entry, list_entries, list_file_entries, search
from skyfleet.trajectories.records import RecordError

GROUPS = [group([1.0, 0.0], task_key="a"), group([None], task_key="b", env_key="mail")]
ATTEMPTS = [trajectory for one in GROUPS for trajectory in one.trajectories]


def in_members(path: Path) -> None:
    """Each attempt in a member of its own."""
    with EpisodeWriter(path) as writer:
        for trajectory in ATTEMPTS:
            writer.add(trajectory)
            writer.flush()


def test_each_step_and_kind_has_its_file(tmp_path: Path) -> None:
    assert train_path(tmp_path, 12) == tmp_path / "train/step_000012.jsonl.gz"
    assert eval_path(tmp_path, "held/out", 0) == tmp_path / "eval/held_out/step_000000.jsonl.gz"


def test_what_is_written_is_read_in_order_and_by_any_gzip(tmp_path: Path) -> None:
    path = train_path(tmp_path, 1)
    write_groups(path, GROUPS)
    assert list(read_trajectories(path)) == ATTEMPTS
    assert sorted(path.parent.iterdir()) == sorted([path, index_path(path)])
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    assert [row["task_key"] for row in rows] == ["a", "a", "b"]


def test_no_groups_are_an_empty_file(tmp_path: Path) -> None:
    path = train_path(tmp_path, 1)
    write_groups(path, [])
    assert list(read_trajectories(path)) == []
    assert list_file_entries(path) == []


def test_writing_a_step_again_replaces_it(tmp_path: Path) -> None:
    path = train_path(tmp_path, 1)
    write_groups(path, GROUPS)
    write_groups(path, GROUPS[:1])
    assert list(read_trajectories(path)) == ATTEMPTS[:2]
    assert len(list_file_entries(path)) == 2


def test_an_episode_can_be_read_while_later_ones_are_still_played(tmp_path: Path) -> None:
    path = train_path(tmp_path, 1)
    with EpisodeWriter(path) as writer:
        writer.add(ATTEMPTS[0])
        assert list_file_entries(path) == []
        writer.flush()
        (entry,) = list_file_entries(path)
        assert load(entry) == ATTEMPTS[0]
        writer.add(ATTEMPTS[1])
    assert [load(entry) for entry in list_file_entries(path)] == ATTEMPTS[:2]


def test_an_episode_that_cannot_be_written_loses_none_before_it(tmp_path: Path) -> None:
    path = train_path(tmp_path, 1)
    with EpisodeWriter(path) as writer:
        writer.add(ATTEMPTS[0])
        with pytest.raises(TypeError, match="bytes"):
            writer.add(attempt(1.0, task_key=b"not text"))  # type: ignore[arg-type]
    assert list(read_trajectories(path)) == ATTEMPTS[:1]


def test_every_entry_summarises_its_episode_without_reading_it(tmp_path: Path) -> None:
    path = eval_path(tmp_path, "val", 40)
    in_members(path)
    entries = list_entries(tmp_path)
    assert [load(entry) for entry in entries] == ATTEMPTS
    assert [entry.id for entry in entries] == [f"eval/val/40/{n}" for n in range(3)]
    assert [(e.task_key, e.env_key, e.reward, e.success) for e in entries] == [
        (t.task_key, t.env_key, t.reward, t.success) for t in ATTEMPTS
    ]
    assert find_entry(tmp_path, "eval/val/40/2") == entries[2]


def test_tool_errors_and_sampled_tokens_are_those_of_the_metrics() -> None:
    complaint = Message(role="user", content="no call found", is_error=True)
    turns = (call_turn(is_error=True), replace(call_turn(), replies=(complaint,)))
    episode = attempt(1.0, turns=turns, transcripts=(transcript(3), transcript(5)))
    row = dict(zip(COLUMNS, index_values(episode), strict=False))
    metrics = episode_metrics([*played(episode)])
    assert row["tool_errors"] == metrics["environment/total_tool_errors"] == 1
    assert row["sampled_tokens"] == metrics["generate/avg_assistant_tokens"] == 8


def test_an_index_that_is_lost_is_read_from_the_episodes(tmp_path: Path) -> None:
    path = train_path(tmp_path, 3)
    in_members(path)
    entries = list_file_entries(path)
    index_path(path).unlink()
    assert list_file_entries(path) == entries


@pytest.mark.parametrize("entry_id", ["", "train/1", "train/1/99", "train/x/0", "eval/no/1/0"])
def test_an_unknown_episode_is_one_sentence(tmp_path: Path, entry_id: str) -> None:
    in_members(train_path(tmp_path, 1))
    with pytest.raises(RecordError, match=r"has no such episode; use one like train/1/0$"):
        find_entry(tmp_path, entry_id)


def test_an_unknown_episode_is_answered_with_those_of_the_run(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"the folder has no episodes$"):
        find_entry(tmp_path, "eval/val/1/0")
    in_members(eval_path(tmp_path, "unseen", 0))
    in_members(eval_path(tmp_path, "unseen", 40))
    in_members(eval_path(tmp_path, "elsewhere", 40))
    with pytest.raises(
        RecordError, match=r"use one like eval/elsewhere/40/0, eval/unseen/40/0$"
    ) as caught:
        find_entry(tmp_path, "eval/val/1/0")
    for entry_id in str(caught.value).rpartition("use one like ")[2].split(", "):
        assert find_entry(tmp_path, entry_id).id == entry_id


def test_an_episode_is_not_named_from_a_step_that_holds_none(tmp_path: Path) -> None:
    in_members(train_path(tmp_path, 1))
    with EpisodeWriter(train_path(tmp_path, 2)):
        pass
    with pytest.raises(RecordError, match=r"use one like train/1/0$"):
        find_entry(tmp_path, "train/2/0")


def test_a_truncated_end_is_skipped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = train_path(tmp_path, 1)
    in_members(path)
    *_, (last, _) = members(path)
    whole = path.read_bytes()
    for size in (last + 1, last + 15, len(whole) - 1):
        path.write_bytes(whole[:size])
        with caplog.at_level(logging.WARNING):
            assert list(read_trajectories(path)) == ATTEMPTS[:2]
        assert f"{path} is truncated at byte {last}" in caplog.text
        caplog.clear()
    index = index_path(path)
    index.write_bytes(index.read_bytes()[:-5])
    assert len(list_file_entries(path)) == 2


def test_a_member_broken_in_the_middle_names_its_place(tmp_path: Path) -> None:
    path = train_path(tmp_path, 1)
    in_members(path)
    data = bytearray(path.read_bytes())
    data[40] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(RecordError, match=r"step_000001.jsonl.gz at byte 0: .*; copy the file"):
        list(read_trajectories(path))


def test_a_record_of_another_version_names_its_place(tmp_path: Path) -> None:
    path = train_path(tmp_path, 1)
    path.parent.mkdir()
    path.write_bytes(gzip.compress(b'{"version": 9}\n'))
    with pytest.raises(RecordError, match=r"at byte 0: version=9"):
        list(read_trajectories(path))


def test_search_finds_what_an_episode_says_in_any_case_and_script(tmp_path: Path) -> None:
    output = replace(ATTEMPTS[1], prompt=(Message(role="user", content='Grüße an "Ümit"'),))
    path = train_path(tmp_path, 1)
    with EpisodeWriter(path) as writer:
        for trajectory in (ATTEMPTS[0], output, ATTEMPTS[2]):
            writer.add(trajectory)
    entries = list_entries(tmp_path)
    assert list(search(entries, 'AN "Ümit')) == [entries[1]]
    assert list(search(entries, "nowhere")) == []


@pytest.mark.parametrize("line", ["[1, 2]", "{", '"text"', "3", "[\xff]"])
def test_a_damaged_line_of_an_index_is_named_with_the_way_out(tmp_path: Path, line: str) -> None:
    path = train_path(tmp_path, 1)
    write_groups(path, GROUPS)
    index = index_path(path)
    with index.open("a", encoding="latin-1") as file:
        file.write(f"{line}\n")
    with pytest.raises(RecordError, match=r"step_000001\.index\.jsonl line 5: .*delete the index"):
        list_entries(tmp_path)
    result: list[RecordError] = []
    write_groups(train_path(tmp_path, 2), GROUPS)
    assert [e.step for e in list_entries(tmp_path, on_damage=result.append)] == [2, 2, 2]
    assert len(result) == 1
    index.unlink()
    assert len(list_file_entries(path)) == 3


def test_an_index_of_other_columns_and_an_episode_that_is_none_are_named(tmp_path: Path) -> None:
    path = train_path(tmp_path, 1)
    write_groups(path, GROUPS)
    index_path(path).write_text('["env_key"]\n["github"]\n')
    with pytest.raises(RecordError, match=r"index\.jsonl line 1: the columns are"):
        list_file_entries(path)
    index_path(path).unlink()
    path.write_bytes(gzip.compress(b"{\n"))
    with pytest.raises(RecordError, match=r"step_000001\.jsonl\.gz at byte 0, line 1: "):
        list_file_entries(path)
