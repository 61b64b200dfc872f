"""Quarantine files, and the check of a run's training data."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyfleet.curation.quarantine import (
    Quarantine,
    check_training_data,
    find_quarantine,
    read_quarantine,
    write_quarantine,
)
from skyfleet.curation.verdict import Reason, Verdict
from skyfleet.errors import ConfigError, TaskError
from skyfleet.tasks.loading import load_tasks, write_tasks
from skyfleet.tasks.manifest import make_manifest
from skyfleet.tasks.prepare import PrepareOptions, prepare
from skyfleet.tasks.publish import dataset_files, publish
from skyfleet.tasks.splits import SplitRule
from skyfleet.tasks.task import Task

A, B = (Task(key=key, env_key="e", prompt="p") for key in "ab")
BAD = Quarantine().updated([Verdict.on(A, (Reason.VACUOUS, "reward 1")), Verdict.on(B, None)])


def dataset(folder: Path) -> str:
    rows = [(i, Task(key=key, env_key="e", prompt=key)) for i, key in enumerate("abcdefgh")]
    rule = SplitRule(eval_fraction=0.25, min_eval_tasks=1)
    prepared = prepare(rows, PrepareOptions(split=rule))
    files = dataset_files(prepared)
    manifest = make_manifest(
        prepared,
        files,
        source="raw",
        source_sha256="",
        options={},
        split_by="ratio",
        earlier=None,
    )
    publish(str(folder), files, manifest)
    return str(folder / "train.parquet")


def test_written_data_is_read_back(tmp_path: Path) -> None:
    write_quarantine(tmp_path / "q.jsonl", BAD)
    assert read_quarantine(tmp_path / "q.jsonl") == BAD
    write_quarantine(tmp_path / "q.jsonl", Quarantine())
    assert read_quarantine(tmp_path / "q.jsonl") == Quarantine()


def test_an_edited_row_is_not_in_quarantine() -> None:
    assert A in BAD
    assert B not in BAD
    assert BAD.reason_for(A) is Reason.VACUOUS
    assert A.model_copy(update={"verifier_code": "corrected"}) not in BAD


def test_a_new_verdict_replaces_the_old_one() -> None:
    more = BAD.updated([Verdict.on(B, (Reason.FLAKY, "1, then 0"))])
    assert (more.reason_for(A), more.reason_for(B)) == (Reason.VACUOUS, Reason.FLAKY)
    assert A not in more.updated([Verdict.on(A, None)])


def test_an_unverified_row_is_not_in_quarantine(tmp_path: Path) -> None:
    unverified = Verdict.on(A, (Reason.UNVERIFIED, "solution is empty"))
    assert unverified.ok
    assert A not in Quarantine().updated([unverified])
    row = BAD.rows[A.key, unverified.row_sha256].model_dump_json()
    (tmp_path / "q.jsonl").write_text(row.replace("vacuous", "no reference") + "\n")
    assert A not in read_quarantine(tmp_path / "q.jsonl"), "an earlier version's word for it"


def test_an_invalid_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"key": "a", "row_sha256": "0", "reason": "dull"}\n')
    with pytest.raises(TaskError, match=r"q.jsonl row 1: reason: Input should be"):
        read_quarantine(tmp_path / "q.jsonl")


def test_a_prepared_file_is_accepted(tmp_path: Path) -> None:
    source = dataset(tmp_path / "data")
    check_training_data(load_tasks(source), [source], allow_unmanifested=False, quarantine=BAD)


def test_a_world_needs_no_manifest() -> None:
    check_training_data([], ["world:github?count=3"], allow_unmanifested=False, quarantine=None)


def test_a_file_without_a_manifest_is_rejected_unless_allowed(tmp_path: Path) -> None:
    source = str(tmp_path / "tasks.jsonl")
    write_tasks(source, [A])
    with pytest.raises(ConfigError, match=r"has no manifest.json beside it; .*allow_unmanifested"):
        check_training_data([A], [source], allow_unmanifested=False, quarantine=None)
    check_training_data([A], [source], allow_unmanifested=True, quarantine=None)


def test_rows_that_their_environment_grades_need_no_manifest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = str(tmp_path / "tasks.jsonl")
    graded = [Task(key="g", env_key="gsm8k", prompt="1+1?", env_class="gsm8k")]
    write_tasks(source, graded)
    check_training_data(graded, [source], allow_unmanifested=False, quarantine=None)
    assert f"data.train_data={source!r} has no manifest.json beside it" in caplog.text
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(TaskError, match=r"manifest.json"):
        check_training_data(graded, [source], allow_unmanifested=False, quarantine=None)


@pytest.mark.parametrize(
    "more", [{"env_class": "fleet_task"}, {"env_class": "gsm8k", "verifier_code": "def f(): ..."}]
)
def test_rows_that_a_verifier_grades_need_a_manifest(tmp_path: Path, more: dict[str, str]) -> None:
    source = str(tmp_path / "tasks.jsonl")
    task = Task(key="g", env_key="e", prompt="Do it.").model_copy(update=more)
    write_tasks(source, [task])
    with pytest.raises(ConfigError, match=r"has no manifest.json beside it"):
        check_training_data([task], [source], allow_unmanifested=False, quarantine=None)


def test_a_file_that_changed_or_is_not_in_the_manifest_is_rejected(tmp_path: Path) -> None:
    source = dataset(tmp_path / "data")
    later = str(tmp_path / "data" / "more.jsonl")
    write_tasks(later, [A])
    with pytest.raises(ConfigError, match=r"more.jsonl' is not in the manifest.json beside it"):
        check_training_data([], [later], allow_unmanifested=False, quarantine=None)
    write_tasks(source, [A])
    with pytest.raises(ConfigError, match=r"has changed since its manifest.json was written"):
        check_training_data([], [source], allow_unmanifested=False, quarantine=None)


def test_a_quarantined_task_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"1 tasks in quarantine, such as 'a' \(vacuous\)"):
        check_training_data([A, B], ["world:e"], allow_unmanifested=True, quarantine=BAD)
    check_training_data([B], ["world:e"], allow_unmanifested=True, quarantine=BAD)


@pytest.mark.parametrize("allow_unmanifested", [False, True])
def test_validation_tasks_are_never_trained_on(tmp_path: Path, allow_unmanifested: bool) -> None:
    train = dataset(tmp_path / "data")
    validation = str(tmp_path / "data" / "validation.parquet")
    leaked = str(tmp_path / "leaked.jsonl")
    write_tasks(leaked, load_tasks(validation))
    says = (
        r"contains 2 tasks, such as 'a', that the manifest.json beside .* lists on the validation"
    )
    with pytest.raises(ConfigError, match=says):
        check_training_data(
            load_tasks(validation),
            [validation],
            allow_unmanifested=allow_unmanifested,
            quarantine=None,
        )
    with pytest.raises(ConfigError, match=says):
        check_training_data(
            [*load_tasks(train), *load_tasks(leaked)],
            [train],
            allow_unmanifested=allow_unmanifested,
            quarantine=None,
        )


def test_an_unlisted_file_is_not_checked_against_the_manifest_beside_it(tmp_path: Path) -> None:
    source = str(tmp_path / "tasks.jsonl")
    write_tasks(source, [A])
    (tmp_path / "manifest.json").write_text('{"name": "of something else"}')
    check_training_data([A], [source], allow_unmanifested=True, quarantine=None)


def test_quarantine_files_beside_the_sources_are_read_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    monkeypatch.chdir(here)
    sources = ["world:github?count=3", str(there / "tasks.jsonl")]
    assert find_quarantine(sources, None) == Quarantine()
    write_quarantine(there / "quarantine.jsonl", BAD)
    assert find_quarantine(sources, None) == BAD
    worse = Quarantine().updated([Verdict.on(B, (Reason.FLAKY, "1, then 0"))])
    write_quarantine(here / "quarantine.jsonl", worse)
    both = find_quarantine(sources, None)
    assert A in both
    assert B in both
    assert list(both.files) == [str(there / "quarantine.jsonl"), "quarantine.jsonl"]
    assert find_quarantine(sources, "quarantine.jsonl") == worse
    with pytest.raises(FileNotFoundError):
        find_quarantine(sources, "none.jsonl")


def test_a_quarantine_file_with_two_names_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_quarantine("quarantine.jsonl", BAD)
    found = find_quarantine(["a.jsonl", str(tmp_path / "b.jsonl")], None)
    assert list(found.files) == ["quarantine.jsonl"]


def test_a_row_that_fails_in_one_source_stays_in_quarantine() -> None:
    fails, passes = Verdict.on(A, (Reason.OVERLAP, "the same as a of eval")), Verdict.on(A, None)
    assert A in Quarantine().updated([fails, passes])
    assert A in Quarantine().updated([passes, fails])


def test_a_quarantine_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_bytes('{"key": "é"}'.encode("latin-1"))
    with pytest.raises(TaskError, match=r"q.jsonl: 'utf-8' codec .*skyfleet tasks validate"):
        read_quarantine(tmp_path / "q.jsonl")
