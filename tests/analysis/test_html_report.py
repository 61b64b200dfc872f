"""The report is one page that needs nothing else, and says what the run recorded."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html import unescape
from pathlib import Path

import pytest
import typer
from tests.analysis.report_runs import (
    add_evaluation,
    add_rows,
    add_training,
    empty_run,
    rewarded,
    small_run,
    telling_run,
)
from typer.testing import CliRunner

from skyfleet.analysis.html.episodes import chosen
from skyfleet.analysis.html.page import report_page, write_report
from skyfleet.analysis.html.shown_run import quarters, read_runs
from skyfleet.analysis.html.windows import mean_rewards, mixed_shares, prompts_of
from skyfleet.analysis.html.wording import NOTHING
from skyfleet.cli.report import report_command
from skyfleet.config.loading import load_config_file
from skyfleet.errors import ConfigError


def words(page: str) -> str:
    """What a reader sees: no tags, no style, no script, plain spaces."""
    body = re.sub(r"<(style|script)>.*?</\1>", "", page, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", body)).split())


def test_an_unknown_grade_is_in_no_curve(tmp_path: Path) -> None:
    run = empty_run(tmp_path / "run")
    mixed = rewarded([1.0, None, 0.0], n_tasks=1, env_key="a")
    add_training(run, 1, [*mixed, *rewarded([1.0, None], n_tasks=1, env_key="b")])
    add_training(run, 2, rewarded([None], n_tasks=1, env_key="a"))
    prompts = prompts_of(run.entries())
    assert prompts == {1: [[1.0, 0.0], [1.0]]}
    assert [point.value for point in mean_rewards(prompts)] == [0.75]
    assert [point.value for point in mixed_shares(prompts)] == [1.0]


def test_quarters_are_of_steps_and_never_empty(tmp_path: Path) -> None:
    (run,) = read_runs([small_run(tmp_path / "run", n_steps=8)])
    first, last = quarters(run)
    assert {entry.step for entry in first} == {1, 2}
    assert {entry.step for entry in last} == {7, 8}
    (short,) = read_runs([small_run(tmp_path / "short", n_steps=1)])
    assert [len(side) for side in quarters(short)] == [6, 6]


def test_examples_are_late_and_from_evaluation_where_there_is_any(tmp_path: Path) -> None:
    (run,) = read_runs([small_run(tmp_path / "run")])
    assert [(entry.env_key, entry.success, entry.id) for entry in chosen(run)] == [
        ("mail", True, "eval/unseen/8/0"),
        ("mail", False, "eval/unseen/0/0"),
        ("maps", False, "train/8/4"),
    ]


def test_the_page_says_what_the_run_recorded(tmp_path: Path) -> None:
    page = words(report_page([small_run(tmp_path / "run")]))
    for said in (
        "8 steps, 48 training and 40 evaluation episodes, 8 of unknown grade, 6 min 00 s",
        "▲ IMPROVED unseen : 0.0 % before (step 0), 100.0 % after (step 8), +100.0 points",
        "8 of 48 episodes have no known grade and are in no reward",
        "mail teaches",
        "passed 0.0 % 100.0 % +100.0",
        "rollout 4 min 30 s 75.0 %",
        "gap 9 0 4 4",
        "trainer.seed 7 42",
        "#episode=eval/unseen/8/0",
    ):
        assert said in page


def test_the_same_run_gives_the_same_page(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    write_report([run], tmp_path / "pages" / "report.html")
    assert (tmp_path / "pages" / "report.html").read_text() == report_page([run])


def test_several_runs_are_compared_with_the_first(tmp_path: Path) -> None:
    runs = [small_run(tmp_path / "old", lifts=False), small_run(tmp_path / "new")]
    page = words(report_page(runs))
    assert "A old against B new: last evaluation of each" in page
    assert "▲ IMPROVED unseen : 0.0 % A (step 8), 100.0 % B (step 8)" in page
    assert "The runs have the same configuration." in page
    assert "B old" not in page


def test_a_run_that_has_only_begun_has_a_page(tmp_path: Path) -> None:
    page = words(report_page([empty_run(tmp_path / "run")]))
    for said in (
        "No evaluation was recorded.",
        "No training episode was recorded.",
        "No evaluation episode was recorded.",
        "No times were recorded.",
        "no sentinel recorded anything",
        "No episode was recorded.",
    ):
        assert said in page


def test_one_evaluation_is_shown_and_not_compared(tmp_path: Path) -> None:
    run = empty_run(tmp_path / "run")
    add_evaluation(run, "val", 0, rewarded([1.0, 0.0], n_tasks=4, env_key="mail"))
    page = words(report_page([run]))
    assert "nothing to compare it with" in page
    assert "val, step 0 mail 4 8 0 50.0 %" in page


def test_grades_that_are_all_unknown_are_shown_as_such(tmp_path: Path) -> None:
    run = empty_run(tmp_path / "run")
    for step in (0, 1):
        add_evaluation(run, "val", step, rewarded([None], n_tasks=3, env_key="mail"))
    add_training(run, 1, rewarded([None, None], n_tasks=2, env_key="mail"))
    add_rows(run, [{"step": 1, "sentinel/gap": float("nan")}], [{"step": 1, "timing/eval": 0.0}])
    page = words(report_page([run]))
    assert "have no task graded in both" in page
    assert f"val, step 1 mail 0 0 3 {NOTHING} {NOTHING} {NOTHING}" in page
    assert "4 of 4 episodes have no known grade" in page


def test_data_with_a_manifest_is_named_by_its_hash(tmp_path: Path) -> None:
    source = tmp_path / "data" / "train.jsonl"
    source.parent.mkdir()
    row = {"side": "train", "sha256": "0"}
    manifest = {
        "source": "raw.json",
        "source_sha256": "0123456789abcdef",
        "options": {},
        "split_by": "ratio",
        "thresholds": {},
        "counts": {"mail": {"train": 12, "validation": 3}},
        "unique_prompts": {"train": 12, "validation": 3},
        "dropped": {"no prompt": 2},
        "moved": {},
        "files": {"train.jsonl": "fedcba9876543210"},
        "tasks": {"a": row},
    }
    (source.parent / "manifest.json").write_text(json.dumps(manifest))
    named = f"data.train_data=[{source}, 's3://bucket/x.jsonl', 'world:github?count=1', gone.jsonl]"
    page = words(report_page([empty_run(tmp_path / "run", named)]))
    assert "mail 12 3" in page
    assert "From raw.json (0123456789ab), split by ratio" in page
    assert "Rows left out: 2 no prompt. Files: train.jsonl fedcba987654." in page
    assert "s3://bucket/x.jsonl is on another machine" in page
    assert "world:github?count=1 is made from its address" in page
    assert "gone.jsonl has no manifest.json that can be read from here" in page


def test_the_policy_allows_only_the_style_and_the_script_of_the_page(tmp_path: Path) -> None:
    page = report_page([small_run(tmp_path / "run")])
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="(.*?)">', page)
    hashes = {}
    for name in ("style", "script"):
        (text,) = re.findall(rf"<{name}>(.*?)</{name}>", page, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[name] = f"'sha256-{digest}'"
    assert unescape(policy) == (
        f"default-src 'none'; style-src {hashes['style']}; script-src {hashes['script']}; "
        "base-uri 'none'; form-action 'none'"
    )
    assert not re.search(r"https?://|\ssrc=|\sstyle=|url\(|@import", page)


def test_what_a_run_says_is_only_text(tmp_path: Path) -> None:
    page = report_page([telling_run(tmp_path, "<img src=x onerror=alert(1)>")])
    assert "<img" not in page
    assert page.count("&lt;img") > 30


def test_half_a_surrogate_pair_does_not_stop_the_page(tmp_path: Path) -> None:
    run = empty_run(tmp_path / "run")
    add_training(run, 1, rewarded([1.0], n_tasks=1, env_key="a\ud83d"))
    write_report([run], tmp_path / "report.html")
    assert r"a\ud83d" in (tmp_path / "report.html").read_text()


def test_the_command_writes_into_the_first_run_unless_told(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(report_command)
    run = small_run(tmp_path / "run").path
    planned = CliRunner().invoke(app, [str(run), "--dry-run"], catch_exceptions=False)
    assert planned.output == f"would write the report of run to {run / 'report.html'}\n"
    assert not (run / "report.html").exists()
    done = CliRunner().invoke(app, [str(run)], catch_exceptions=False)
    assert f"The report is in {run / 'report.html'} (" in done.output
    assert (run / "report.html").exists()
    with pytest.raises(ConfigError, match="is not a run folder"):
        CliRunner().invoke(app, [str(tmp_path)], catch_exceptions=False)


def test_the_configuration_is_the_one_the_run_had(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    page = unescape(report_page([run]))
    (shown,) = re.findall(r"<pre[^>]*>(.*?)</pre>", page, flags=re.DOTALL)
    (tmp_path / "shown.yaml").write_text(shown)
    assert load_config_file(str(tmp_path / "shown.yaml")) == run.config
