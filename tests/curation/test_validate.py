"""Validation finds each of 62 planted faults, and twenty good tasks of every world pass."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from tests.curation.planted_faults import ALWAYS, FLAKES, bad_tasks, good_tasks, open_planted

from skyfleet.curation.inspection import open_inspectable
from skyfleet.curation.validate import validate
from skyfleet.curation.verdict import Reason, Verdict, open_journal
from skyfleet.envs.env import Env
from skyfleet.errors import ConfigError
from skyfleet.tasks.task import Task
from skyfleet.worlds.catalog import WORLD_NAMES, generate_world_tasks


async def test_every_planted_fault_is_found_with_its_reason(tmp_path: Path) -> None:
    FLAKES.clear()
    sources, planted = bad_tasks()
    with open_journal(tmp_path / "journal", {}) as journal:
        verdicts = await validate(sources, open_planted, journal=journal)
    assert len(planted) == 62
    assert len(set(planted.values())) == 12
    assert {v.task_key: v.reason for v in verdicts if v.reason is not None} == planted
    assert all(v.evidence for v in verdicts if v.reason is not None)
    assert sum(v.reason is None for v in verdicts) == 9  # the originals of the duplicates


@pytest.mark.slow
@pytest.mark.parametrize("name", WORLD_NAMES)
async def test_twenty_tasks_of_every_world_pass(tmp_path: Path, name: str) -> None:
    tasks = generate_world_tasks(name, split="all", count=20)
    with open_journal(tmp_path / "journal", {}) as journal:
        verdicts = await validate({"good": tasks}, open_inspectable, journal=journal)
    assert [(v.task_key, v.reason, v.evidence) for v in verdicts if not v.ok] == []
    assert [v.task_key for v in verdicts] == [task.key for task in tasks]


async def test_good_tasks_of_every_template_pass(tmp_path: Path) -> None:
    tasks = good_tasks(github=24, outlook=24)
    with open_journal(tmp_path / "journal", {}) as journal:
        verdicts = await validate({"good": tasks}, open_inspectable, journal=journal)
    assert Counter(v.reason for v in verdicts) == {None: 48}


async def test_an_interrupted_validation_resumes(tmp_path: Path) -> None:
    tasks, path = good_tasks(github=6), tmp_path / "journal"
    opened: list[str] = []

    async def open_counted(task: Task) -> Env:
        opened.append(task.key)
        return await open_inspectable(task)

    with open_journal(path, {}) as journal:
        first = await validate({"a": tasks[:3]}, open_counted, journal=journal)
    path.write_text(path.read_text() + '{"task_key": "cut o')  # interrupted in the middle of a line
    assert set(opened) == {task.key for task in tasks[:3]}
    opened.clear()
    finished: list[Verdict] = []
    with open_journal(path, {}, resume=True) as journal:
        all_six = await validate(
            {"a": tasks}, open_counted, journal=journal, on_finished=finished.append
        )
    assert set(opened) == {task.key for task in tasks[3:]}
    assert all_six[:3] == first
    assert len(all_six) == len(finished) == 6
    heading, *lines = path.read_text().splitlines()
    assert heading == "{}"
    written = [json.loads(line)["task_key"] for line in lines]  # in the order in which they end
    assert sorted(written) == sorted(task.key for task in tasks)


async def test_an_edited_row_is_checked_again(tmp_path: Path) -> None:
    (task,) = good_tasks(github=1)
    with open_journal(tmp_path / "journal", {}) as journal:
        (before,) = await validate({"a": [task]}, open_inspectable, journal=journal)
    edited = task.model_copy(update={"solution": ()})
    with open_journal(tmp_path / "journal", {}, resume=True) as journal:
        (after,) = await validate({"a": [edited]}, open_inspectable, journal=journal)
    assert (before.reason, after.reason) == (None, Reason.UNVERIFIED)


def test_the_log_of_other_checks_is_not_reused(tmp_path: Path) -> None:
    with open_journal(tmp_path / "journal", {"attempts": 4}):
        pass
    with (
        pytest.raises(ConfigError, match=r"written with .*4.* now they are .*8.*with --restart"),
        open_journal(tmp_path / "journal", {"attempts": 8}, resume=True),
    ):
        pass


async def test_existing_verdicts_are_not_discarded_without_restart(tmp_path: Path) -> None:
    tasks, path = good_tasks(github=1), tmp_path / "journal"
    with open_journal(path, {}) as journal:
        await validate({"a": tasks}, open_inspectable, journal=journal)
    before = path.read_text()
    says = "contains 1 verdicts of these checks; continue with --resume.* start over with --restart"
    with pytest.raises(ConfigError, match=says), open_journal(path, {}):
        pass
    assert path.read_text() == before
    with open_journal(path, {}, restart=True) as journal:
        assert journal.find(tasks[0]) is None
    with open_journal(path, {"attempts": 4}) as journal:
        assert journal.find(tasks[0]) is None


async def test_a_corrected_copy_is_no_duplicate_of_the_faulty_task(tmp_path: Path) -> None:
    (good,) = good_tasks(github=1)
    bad, worse = (
        good.model_copy(update={"key": key, "verifier_code": ALWAYS}) for key in ("bad", "worse")
    )
    again = good.model_copy(update={"key": "again"})
    finished: list[Verdict] = []
    with open_journal(tmp_path / "journal", {}) as journal:
        verdicts = await validate(
            {"a": [bad, worse, good], "b": [again]},
            open_inspectable,
            journal=journal,
            on_finished=finished.append,
        )
    reasons = [Reason.VACUOUS, Reason.VACUOUS, None, Reason.OVERLAP]
    assert [verdict.reason for verdict in verdicts] == reasons
    assert verdicts[3].evidence == f"the same as {good.key} of a"
    assert finished == verdicts
