"""`skyfleet tasks prepare | validate | stats`, from raw rows to a training dataset."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from skyfleet.cli.tasks_data import stats_command, validate_command
from skyfleet.cli.tasks_prepare import prepare_command
from skyfleet.curation.quarantine import Quarantine, write_quarantine
from skyfleet.curation.verdict import Reason, Verdict
from skyfleet.engines import http_client
from skyfleet.errors import ConfigError, ModelError, SkyfleetError, TaskError
from skyfleet.tasks import loading
from skyfleet.tasks.loading import load_tasks, write_tasks
from skyfleet.tasks.manifest import read_manifest
from skyfleet.worlds.catalog import generate_world_tasks

app = typer.Typer()
app.command("prepare")(prepare_command)
app.command("validate")(validate_command)
app.command("stats")(stats_command)


def run(*args: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def rows(n: int, **fields: Any) -> list[dict[str, Any]]:
    return [
        {"task_key": f"k{i}", "env_id": "github", "prompt": f"do {i}", **fields} for i in range(n)
    ]


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    held_out = [{"key": "o", "env_key": "outlook", "prompt": "p"}]
    (tmp_path / "raw.json").write_text(json.dumps({"tasks": rows(300) + held_out}))
    return tmp_path / "raw.json"


def test_prepare_writes_a_dataset_with_the_default_split(tmp_path: Path, raw: Path) -> None:
    output = run("prepare", "--tasks-json", raw, "--output-dir", tmp_path / "out")
    manifest = read_manifest(tmp_path / "out" / "manifest.json")
    assert manifest.thresholds == {"github": 6 / 300, "outlook": 1.0}
    counts = manifest.counts["github"]
    assert counts["train"] + counts["validation"] == 300
    assert manifest.options["held_out"] == ["instacart", "outlook"]
    validation = load_tasks(tmp_path / "out" / "validation.parquet")
    assert len(validation) == counts["validation"] + 1
    assert "| outlook     |     0 |          1 |     1 |" in output
    assert "largest share of training: github, 100%" in output
    assert "wrote " in output


def test_a_prepared_dataset_has_a_version_name_that_stats_shows(tmp_path: Path, raw: Path) -> None:
    options = ("--tasks-json", raw, "--output-dir", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"--data-version 'v 2': use letters, digits"):
        run("prepare", *options, "--data-version", "v 2")
    assert "dataset version: v0.3" in run("prepare", *options, "--data-version", "v0.3")
    assert read_manifest(tmp_path / "out" / "manifest.json").data_version == "v0.3"
    train = tmp_path / "out" / "train.parquet"
    output = run("stats", train)
    assert f"dataset version of {train}: v0.3" in output
    assert "rows with env_variables: 0 % (0 of " in output


def test_prepare_is_reproducible_and_keeps_sides_on_request(tmp_path: Path, raw: Path) -> None:
    out = tmp_path / "out"
    run("prepare", "--tasks-json", raw, "--output-dir", out, "--eval-ratio", 0.2)
    before = (out / "manifest.json").read_bytes()
    run("prepare", "--tasks-json", raw, "--output-dir", out, "--eval-ratio", 0.2)
    assert (out / "manifest.json").read_bytes() == before
    raw.write_text(json.dumps(rows(97)))
    options = ("--tasks-json", raw, "--output-dir", out, "--eval-ratio", 0.2)
    run("prepare", *options, "--keep-sides")
    kept = read_manifest(out / "manifest.json")
    assert (kept.moved, kept.split_by, kept.thresholds) == (
        {},
        "earlier thresholds",
        {"github": 0.2},
    )


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (rows(3, env_id="outlook"), (), "no task is left to train on"),
        ([{"key": "k", "env_key": "e"}], (), "raw.json row 1: prompt is missing; add it"),
        (rows(2, task_modality="cu"), (), "row 1: task_modality='cu'"),
        (rows(1, key="other"), (), "row 1: key='other' and task_key='k0' are the same field"),
        (rows(9), ("--env-filter", "githb"), "env_filter names 'githb'"),
        (rows(9), ("--difficulty-filter", "hard"), "--difficulty-filter 'hard'"),
        (rows(9), ("--keep-sides",), "holds no earlier manifest"),
    ],
)
def test_prepare_writes_nothing_if_the_input_is_invalid(
    tmp_path: Path, content: Any, options: tuple[str, ...], message: str
) -> None:
    (tmp_path / "raw.json").write_text(json.dumps(content))
    with pytest.raises(SkyfleetError, match=message):
        run(
            "prepare",
            "--tasks-json",
            tmp_path / "raw.json",
            "--output-dir",
            tmp_path / "o",
            *options,
        )
    assert [path.name for path in tmp_path.iterdir()] == ["raw.json"]


def test_an_environment_too_small_to_evaluate_is_only_trained_on(tmp_path: Path) -> None:
    (tmp_path / "raw.json").write_text(json.dumps(rows(120)))
    options = ("--tasks-json", tmp_path / "raw.json", "--output-dir", tmp_path / "out")
    run("prepare", *options, "--eval-ratio", 0.1)
    output = run("prepare", *options)
    # int(120 x 0.02) = 2 of the five that an environment needs.
    assert "of 120 github tasks --eval-ratio 0.02 selects 2, and an environment needs" in output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "manifest.json",
        "train.parquet",
    ]
    assert len(load_tasks(tmp_path / "out" / "train.parquet")) == 120


def test_both_modalities_leave_out_the_one_that_has_none_of_the_environments(
    tmp_path: Path,
) -> None:
    for modality, env in (("tool_use", "github"), ("computer_use", "maps")):
        there = rows(10, env_id=env, task_modality=modality)
        (tmp_path / f"all_{modality}.json").write_text(json.dumps(there))
    options: tuple[object, ...] = ("--tasks-json", tmp_path / "all_{modality}.json")
    options += ("--output-dir", tmp_path / "o" / "{modality}", "--modality", "both")
    assert "left out computer_use: it has no task of github" in run(
        "prepare", *options, "--env-filter", "github"
    )
    assert [path.name for path in (tmp_path / "o").iterdir()] == ["tool_use"]
    run("prepare", *options, "--env-filter", "github,maps")
    assert len(load_tasks(tmp_path / "o" / "computer_use" / "train.parquet")) == 10
    with pytest.raises(TaskError, match="'githb', which has no task in either modality"):
        run("prepare", *options, "--env-filter", "github,githb")


def test_validate_writes_the_quarantine_that_prepare_applies(tmp_path: Path) -> None:
    good, bad = generate_world_tasks("github", split="all", count=2)
    always = "def validate_task(env):\n    return 1\n"
    write_tasks(tmp_path / "raw.jsonl", [good, bad.model_copy(update={"verifier_code": always})])
    quarantine = tmp_path / "quarantine.jsonl"
    output = run("validate", tmp_path / "raw.jsonl", "--quarantine", quarantine)
    assert "| ok      |     1 |" in output
    assert f"doing nothing passes | {bad.key}: reward 1" in output
    assert f"quarantine: {quarantine}" in output
    assert json.loads(quarantine.read_text())["key"] == bad.key
    options = ("--output-dir", tmp_path / "out", "--quarantine", quarantine)
    output = run("prepare", "--tasks-json", tmp_path / "raw.jsonl", *options)
    assert "none is evaluated: of 1 github tasks" in output
    assert bad.key not in read_manifest(tmp_path / "out" / "manifest.json").tasks


def test_validate_resumes_from_its_journal(tmp_path: Path) -> None:
    quarantine = tmp_path / "q.jsonl"
    source = "world:github?split=all&count=2"
    run("validate", source, "--quarantine", quarantine)
    journal = tmp_path / "q.jsonl.journal"
    before = journal.read_text()
    run("validate", source, "--quarantine", quarantine, "--resume")
    assert journal.read_text() == before
    assert len(before.splitlines()) == 3
    with pytest.raises(ConfigError, match="--resume and --restart exclude each other"):
        run("validate", source, "--quarantine", quarantine, "--resume", "--restart")
    with pytest.raises(ConfigError, match="contains 2 verdicts of these checks"):
        run("validate", source, "--quarantine", quarantine)
    run("validate", source, "--quarantine", quarantine, "--restart")
    assert sorted(journal.read_text().splitlines()) == sorted(before.splitlines())


def test_validate_needs_both_teacher_options_and_an_ordered_band(tmp_path: Path) -> None:
    source = "world:github?split=all&count=1"
    with pytest.raises(ConfigError, match="--teacher and --teacher-model belong together"):
        run("validate", source, "--teacher", "http://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"--band 0\.9 0\.1: pass two rates"):
        run("validate", source, "--band", "0.9", "0.1")


def test_stats_shows_a_table_and_writes_html(tmp_path: Path) -> None:
    output = run("stats", "world:github?split=all&count=12", "--html", tmp_path / "s.html")
    assert "| github |    12 |" in output
    assert (tmp_path / "s.html").read_text().startswith("<section>")


def test_dry_runs_print_a_plan_and_write_nothing(tmp_path: Path, raw: Path) -> None:
    out = tmp_path / "out"
    assert f"would write {out}" in run(
        "prepare", "--tasks-json", raw, "--output-dir", out, "--dry-run"
    )
    assert not out.exists()
    source = "world:github?split=all&count=2"
    assert run("validate", source, "--dry-run") == f"would check 2 tasks of {source}\n"


def test_prepare_applies_the_quarantine_beside_the_source_and_records_it_in_the_manifest(
    tmp_path: Path, raw: Path
) -> None:
    options = ("--tasks-json", raw, "--output-dir", tmp_path / "out")
    assert "quarantine: none\n" in run("prepare", *options)
    assert read_manifest(tmp_path / "out" / "manifest.json").options["quarantine"] == {}
    quarantine = tmp_path / "quarantine.jsonl"
    first = load_tasks(raw)[0]
    write_quarantine(
        quarantine, Quarantine().updated([Verdict.on(first, (Reason.VACUOUS, "seen"))])
    )
    output = run("prepare", *options)
    assert f"quarantine: {quarantine}\n" in output
    assert "excluded, quarantined: 1: row 1 (k0)" in output
    manifest = read_manifest(tmp_path / "out" / "manifest.json")
    digest = hashlib.sha256(quarantine.read_bytes()).hexdigest()
    assert manifest.options["quarantine"] == {str(quarantine): digest}
    assert manifest.source_sha256 == hashlib.sha256(raw.read_bytes()).hexdigest()
    (tmp_path / "none").write_text("")
    assert "quarantined" not in run("prepare", *options, "--quarantine", tmp_path / "none")


def test_prepare_reads_its_source_once(
    tmp_path: Path, raw: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = raw.read_bytes()

    def read_and_change(address: Path | str) -> bytes:
        data = Path(address).read_bytes()
        raw.write_text("changed meanwhile")
        return data

    monkeypatch.setattr(loading, "read_bytes", read_and_change)
    run("prepare", "--tasks-json", raw, "--output-dir", tmp_path / "out")
    manifest = read_manifest(tmp_path / "out" / "manifest.json")
    assert manifest.source_sha256 == hashlib.sha256(before).hexdigest()


def test_a_stopped_validation_keeps_its_verdicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_client, "INITIAL_BACKOFF_SECONDS", 0.01)
    bad, good = generate_world_tasks("github", split="all", count=2)
    always = "def validate_task(env):\n    return 1\n"
    write_tasks(tmp_path / "raw.jsonl", [bad.model_copy(update={"verifier_code": always}), good])
    quarantine = tmp_path / "q.jsonl"
    teacher = ("--teacher", "http://127.0.0.1:1", "--teacher-model", "nobody", "--workers", 1)
    with pytest.raises(ExceptionGroup) as caught:
        run("validate", tmp_path / "raw.jsonl", "--quarantine", quarantine, *teacher)
    assert caught.group_contains(ModelError, match=f"could not be called for {good.key}")
    assert json.loads(quarantine.read_text())["key"] == bad.key
