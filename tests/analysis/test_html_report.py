"""The report is one self-contained page with the recorded numbers."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
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
    run_with_text,
    small_run,
)
from tests.trajectories.making import attempt, call_turn, played
from typer.testing import CliRunner

from skyfleet.analysis.dump_import import IMPORTED
from skyfleet.analysis.html.curves import group_rewards_by_prompt, mean_rewards, mixed_shares
from skyfleet.analysis.html.episodes import select_examples
from skyfleet.analysis.html.formatting import NOTHING
from skyfleet.analysis.html.page import build_report_page, write_report
from skyfleet.analysis.html.page_data import first_and_last_entries, read_runs
from skyfleet.cli.report import report_command
from skyfleet.config.loading import load_config_file
from skyfleet.errors import ConfigError
from skyfleet.evaluation.baselines import Baseline
from skyfleet.tasks.task import Task
from skyfleet.trajectories.trajectory import Ending


def words(page: str) -> str:
    """The visible text, with plain spaces."""
    body = re.sub(r"<(style|script)>.*?</\1>", "", page, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", body)).split())


def test_ungraded_episodes_are_in_no_curve(tmp_path: Path) -> None:
    run = empty_run(tmp_path / "run")
    mixed = rewarded([1.0, None, 0.0], n_tasks=1, env_key="a")
    add_training(run, 1, [*mixed, *rewarded([1.0, None], n_tasks=1, env_key="b")])
    add_training(run, 2, rewarded([None], n_tasks=1, env_key="a"))
    prompts = group_rewards_by_prompt(run.entries())
    assert prompts == {1: [[1.0, 0.0], [1.0]]}
    assert [point.value for point in mean_rewards(prompts)] == [0.75]
    assert [point.value for point in mixed_shares(prompts)] == [1.0]


def test_quarters_of_the_steps_are_never_empty(tmp_path: Path) -> None:
    (run,) = read_runs([small_run(tmp_path / "run", n_steps=8)])
    first, last = first_and_last_entries(run)
    assert {entry.step for entry in first} == {1, 2}
    assert {entry.step for entry in last} == {7, 8}
    (short,) = read_runs([small_run(tmp_path / "short", n_steps=1)])
    assert [len(side) for side in first_and_last_entries(short)] == [6, 6]


def test_examples_are_late_and_preferably_from_evaluation(tmp_path: Path) -> None:
    (run,) = read_runs([small_run(tmp_path / "run")])
    assert [(entry.env_key, entry.success, entry.id) for entry in select_examples(run)] == [
        ("mail", True, "eval/unseen/8/0"),
        ("mail", False, "eval/unseen/0/0"),
        ("maps", False, "train/8/4"),
    ]


def test_the_page_shows_the_recorded_numbers(tmp_path: Path) -> None:
    page = words(build_report_page([small_run(tmp_path / "run")]))
    for text in (
        "8 steps, 48 training and 40 evaluation episodes, 8 ungraded, 6 min 00 s",
        "▲ IMPROVED unseen : 0.0 % before (step 0), 100.0 % after (step 8), +100.0 points",
        "8 of 48 episodes are ungraded and not in the rewards",
        "passed 0.0 % 100.0 % +100.0 ",
        "mail: 100 % of groups have mixed outcomes (pass rate 0.50), good learning signal.",
        "unseen mail 0 → 0 0 → 0 0 → 0 0 → 0",
        "generate 4 min 30 s 75.0 %",
        "gap 9 0 4 4",
        "trainer.seed 7 42",
        "--episode eval/unseen/8/0",
    ):
        assert text in page


def test_regressions_come_before_the_verdicts(tmp_path: Path) -> None:
    run = empty_run(tmp_path / "run")
    good = attempt(1.0, turns=(call_turn(),) * 2)
    bad = attempt(0.0, turns=(call_turn(is_error=True),) * 6)
    for step, kind in ((0, good), (9, bad)):
        tries = [replace(kind, task_key=f"t{n}") for n in range(20)]
        add_evaluation(run, "val", step, played(*tries))
    page = words(build_report_page([run]))
    regression = page.index("github in val regressed; read the lost tasks first.")
    errors = page.index("val: tool errors per episode increased in github (0.0 to 6.0)")
    assert regression < errors < page.index("first evaluation to last")
    assert f"val github ↑ 2 → 6 ↑ 2 → 6 ↑ 0 → 6 0 → 0 {NOTHING}" in page
    assert "val github tool errors 20 0 6 +6 +6 to +6" in page


def test_an_unclear_failure_shift_is_grey(tmp_path: Path) -> None:
    run = empty_run(tmp_path / "run")
    stuck = attempt(0.0, ending=Ending.MAX_TURNS)
    for step, n_stuck in ((0, 10), (9, 12)):
        tries = [stuck if n < n_stuck else attempt(1.0) for n in range(20)]
        # Two tasks change in one direction and two in the other.
        order = tries if step == 0 else [*tries[2:], *tries[:2]]
        add_evaluation(
            run, "val", step, played(*(replace(t, task_key=f"t{n}") for n, t in enumerate(order)))
        )
    page = build_report_page([run])
    rows = re.findall(r'<tr class="unclear">(.*?)</tr>', page)
    assert any("out of turns" in row for row in rows)
    page = build_report_page([small_run(tmp_path / "clear")])
    assert 'class="unclear"><th scope="row" class="text">passed' not in page


def test_every_signal_number_is_labelled_run_or_recent(
    tmp_path: Path,
) -> None:
    page = words(build_report_page([small_run(tmp_path / "run")]))
    (head,) = re.findall(r"signal by environment (Environment .*?) mail ", page)
    measures = ("Pass rate", "Mixed", "Variance per prompt", "Steps with signal")
    for measure in measures:
        assert f"{measure}, run {measure}, recent" in head
    # Both prompts of mail are mixed in all 8 steps; maps has one grade per prompt.
    assert "mail 16 2 50.0 % 50.0 % 100.0 % 100.0 % 0.25 0.25 100.0 % 100.0 % 0.0 %" in page
    assert "expected share of mixed groups by group size, at the recent pass rates" in page


def test_scores_are_shown_beside_the_null_agent_and_the_reference(tmp_path: Path) -> None:
    run = empty_run(tmp_path / "run")
    groups = [
        *rewarded([1.0], n_tasks=3, env_key="mail"),
        *rewarded([0.0], n_tasks=1, env_key="maps"),
    ]
    tasks = [
        Task(key=g.task_key, env_key=g.env_key, prompt="x", difficulty=1 + n % 2)
        for n, g in enumerate(groups)
    ]
    baseline = Baseline(null_rate=0.25, oracle_rate=None, vacuous=("mail-0",), impossible=())
    add_evaluation(
        run, "val", 4, groups, tasks=tasks, trained_envs={"mail"}, baselines={"mail": baseline}
    )
    page = words(build_report_page([run]))
    assert re.search(rf"step 4 mail 3 3 0 100.0 % \S+ % to 100.0 % 25.0 % {NOTHING} ", page)
    assert "val: mail: 25.0% of the tasks pass when nothing is done (mail-0)" in page
    assert "val, step 4 held out 1 1 0 0.0 %" in page
    assert "val, step 4 trained 3 3 0 100.0 %" in page
    assert "val, step 4 1 easy 2 2 0 100.0 %" in page
    assert "val, step 4 2 medium 2 2 0 50.0 %" in page


def test_only_damaged_files_are_skipped(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    folder = run.trajectories
    (folder / "eval" / "unseen" / "step_000008.jsonl.gz").write_bytes(b"no gzip")
    cut = folder / "train" / "step_000008.jsonl.gz"
    cut.write_bytes(cut.read_bytes()[:-20])
    gone = folder / "train" / "step_000001"
    gone.with_suffix(".index.jsonl").unlink()
    gone.with_suffix(".jsonl.gz").write_bytes(b"no gzip")
    page = words(build_report_page([run]))
    assert "step_000001.jsonl.gz at byte 0" in page
    assert "unseen at step 8 is skipped: " in page
    assert "eval/unseen/8/0 is skipped: " in page
    assert "train/8/4 is skipped: " in page
    assert "42 training and 40 evaluation episodes" in page
    assert "▲ IMPROVED unseen" in page


def test_an_imported_run_lists_what_is_not_recorded(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    (run.path / IMPORTED).write_text("dumped_evals\n")
    page = words(build_report_page([run]))
    assert "Imported from dumps without configuration, tokens or times." in page
    assert "run: not recorded, because the run was imported." in page
    assert "trainer.seed" not in page


def test_the_same_run_gives_the_same_page(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    write_report([run], tmp_path / "pages" / "report.html")
    assert (tmp_path / "pages" / "report.html").read_text() == build_report_page([run])


def test_several_runs_are_compared_with_the_first(tmp_path: Path) -> None:
    runs = [small_run(tmp_path / "old", lifts=False), small_run(tmp_path / "new")]
    page = words(build_report_page(runs))
    assert "A old against B new: last evaluation of each" in page
    assert "▲ IMPROVED unseen : 0.0 % A (step 8), 100.0 % B (step 8)" in page
    assert "The runs have the same configuration." in page
    assert "B old" not in page


def test_runs_without_a_common_set_are_named(tmp_path: Path) -> None:
    other = empty_run(tmp_path / "other")
    add_evaluation(other, "val", 0, rewarded([1.0], n_tasks=4, env_key="mail"))
    runs = [small_run(tmp_path / "old"), other, empty_run(tmp_path / "none")]
    page = words(build_report_page(runs))
    assert (
        "A old and B other have no evaluation set in common and are not compared: "
        "A old has unseen; B other has val."
    ) in page
    assert "C none has none." in page
    add_evaluation(other, "unseen", 0, rewarded([1.0], n_tasks=4, env_key="mail"))
    assert "val was only evaluated in B other." in words(build_report_page(runs[:2]))


def test_a_run_without_steps_has_a_page(tmp_path: Path) -> None:
    page = words(build_report_page([empty_run(tmp_path / "run")]))
    for text in (
        "No evaluations are recorded.",
        "No training episodes are recorded.",
        "No evaluation episodes are recorded.",
        "No times are recorded.",
        "no sentinels are recorded",
        "No episodes are recorded.",
    ):
        assert text in page


@pytest.mark.parametrize(("mini_batch", "is_noted"), [(4, True), (2, False)])
def test_constant_metrics_are_noted(mini_batch: int, is_noted: bool, tmp_path: Path) -> None:
    sizes = ("trainer.train_batch_size=4", f"trainer.policy_mini_batch_size={mini_batch}")
    page = words(build_report_page([empty_run(tmp_path / "run", *sizes)]))
    assert ("policy/ppo_clip_ratio stays 0" in page) == is_noted


def test_a_single_evaluation_is_shown_without_comparison(tmp_path: Path) -> None:
    run = empty_run(tmp_path / "run")
    add_evaluation(run, "val", 0, rewarded([1.0, 0.0], n_tasks=4, env_key="mail"))
    page = words(build_report_page([run]))
    assert "so there is nothing to compare" in page
    assert "val, step 0 mail 4 8 0 50.0 %" in page


def test_a_run_without_grades_has_a_page(tmp_path: Path) -> None:
    run = empty_run(tmp_path / "run")
    for step in (0, 1):
        add_evaluation(run, "val", step, rewarded([None], n_tasks=3, env_key="mail"))
    add_training(run, 1, rewarded([None, None], n_tasks=2, env_key="mail"))
    add_rows(run, [{"step": 1, "sentinel/gap": float("nan")}], [{"step": 1, "timing/eval": 0.0}])
    page = words(build_report_page([run]))
    assert "have no task graded in both" in page
    assert f"val, step 1 mail 0 0 3 {NOTHING} {NOTHING} {NOTHING}" in page
    assert "4 of 4 episodes are ungraded" in page


def test_training_data_is_listed_with_its_manifest(tmp_path: Path) -> None:
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
    page = words(build_report_page([empty_run(tmp_path / "run", named)]))
    assert "mail 12 3" in page
    assert "From raw.json (0123456789ab), split by ratio" in page
    assert "Dropped rows: 2 no prompt. Files: train.jsonl fedcba987654." in page
    assert "s3://bucket/x.jsonl is remote" in page
    assert "world:github?count=1 is generated" in page
    assert "gone.jsonl has no readable manifest.json" in page


def test_the_security_policy_allows_only_the_inline_style_and_script(tmp_path: Path) -> None:
    page = build_report_page([small_run(tmp_path / "run")])
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


def test_text_of_a_run_is_escaped(tmp_path: Path) -> None:
    page = build_report_page([run_with_text(tmp_path, "<img src=x onerror=alert(1)>")])
    assert "<img" not in page
    assert page.count("&lt;img") > 30


def test_half_a_surrogate_pair_is_written(tmp_path: Path) -> None:
    run = empty_run(tmp_path / "run")
    add_training(run, 1, rewarded([1.0], n_tasks=1, env_key="a\ud83d"))
    write_report([run], tmp_path / "report.html")
    assert r"a\ud83d" in (tmp_path / "report.html").read_text()


def test_the_command_writes_into_the_first_run_by_default(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(report_command)
    run = small_run(tmp_path / "run").path
    planned = CliRunner().invoke(app, [str(run), "--dry-run"], catch_exceptions=False)
    assert planned.output == f"would write the report of run to {run / 'report.html'}\n"
    assert not (run / "report.html").exists()
    done = CliRunner().invoke(app, [str(run)], catch_exceptions=False)
    assert f"The report is in {run / 'report.html'} (" in done.output
    assert (run / "report.html").exists()
    folder = tmp_path / "pages"
    folder.mkdir()
    CliRunner().invoke(app, [str(run), "--output", str(folder)], catch_exceptions=False)
    assert (folder / "report.html").exists()
    with pytest.raises(ConfigError, match="is not a run folder"):
        CliRunner().invoke(app, [str(tmp_path)], catch_exceptions=False)


def test_the_page_contains_the_configuration_of_the_run(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    page = unescape(build_report_page([run]))
    (shown,) = re.findall(r"<pre[^>]*>(.*?)</pre>", page, flags=re.DOTALL)
    (tmp_path / "shown.yaml").write_text(shown)
    assert load_config_file(str(tmp_path / "shown.yaml")) == run.config
