"""The report is one page that needs nothing else, and says what the run recorded."""

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
    small_run,
    telling_run,
)
from tests.trajectories.making import attempt, call_turn, played
from typer.testing import CliRunner

from skyfleet.analysis.html.curves import mean_rewards, mixed_shares, prompts_of
from skyfleet.analysis.html.episodes import chosen
from skyfleet.analysis.html.formatting import NOTHING
from skyfleet.analysis.html.page import report_page, write_report
from skyfleet.analysis.html.page_data import first_and_last, read_runs
from skyfleet.analysis.run_folder import IMPORTED
from skyfleet.cli.report import report_command
from skyfleet.config.loading import load_config_file
from skyfleet.errors import ConfigError
from skyfleet.evaluation.baselines import Baseline
from skyfleet.tasks.task import Task
from skyfleet.trajectories.trajectory import Ending


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
    first, last = first_and_last(run)
    assert {entry.step for entry in first} == {1, 2}
    assert {entry.step for entry in last} == {7, 8}
    (short,) = read_runs([small_run(tmp_path / "short", n_steps=1)])
    assert [len(side) for side in first_and_last(short)] == [6, 6]


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
        "passed 0.0 % 100.0 % +100.0 ",
        "mail teaches: p = 0.50, 100 % of its groups are mixed.",
        "unseen mail 0 → 0 0 → 0 0 → 0 0 → 0",
        "rollout 4 min 30 s 75.0 %",
        "gap 9 0 4 4",
        "trainer.seed 7 42",
        "--episode eval/unseen/8/0",
    ):
        assert said in page


def test_what_got_worse_stands_before_the_verdicts(tmp_path: Path) -> None:
    run = empty_run(tmp_path / "run")
    good = attempt(1.0, turns=(call_turn(),) * 2)
    bad = attempt(0.0, turns=(call_turn(is_error=True),) * 6)
    for step, kind in ((0, good), (9, bad)):
        tries = [replace(kind, task_key=f"t{n}") for n in range(20)]
        add_evaluation(run, "val", step, played(*tries))
    page = words(report_page([run]))
    worse = page.index("github in val regressed: read the tasks it lost before anything else.")
    faults = page.index("val: tool errors an episode rose in github (0.0 to 6.0)")
    assert worse < faults < page.index("first evaluation to last")
    assert f"val github ↑ 2 → 6 ↑ 2 → 6 ↑ 0 → 6 0 → 0 {NOTHING}" in page
    assert "val github tool errors 20 0 6 +6 +6 to +6" in page


def test_a_failure_that_moved_by_chance_is_grey(tmp_path: Path) -> None:
    run = empty_run(tmp_path / "run")
    stuck = attempt(0.0, ending=Ending.MAX_TURNS)
    for step, n_stuck in ((0, 10), (9, 12)):
        tries = [stuck if n < n_stuck else attempt(1.0) for n in range(20)]
        # Two tasks differ between the steps, and another two the other way.
        order = tries if step == 0 else [*tries[2:], *tries[:2]]
        add_evaluation(
            run, "val", step, played(*(replace(t, task_key=f"t{n}") for n, t in enumerate(order)))
        )
    page = report_page([run])
    rows = re.findall(r'<tr class="unclear">(.*?)</tr>', page)
    assert any("out of turns" in row for row in rows)
    telling = report_page([small_run(tmp_path / "clear")])
    assert 'class="unclear"><th scope="row" class="text">passed' not in telling


def test_every_number_of_the_signal_says_whether_it_is_of_the_run_or_of_late(
    tmp_path: Path,
) -> None:
    page = words(report_page([small_run(tmp_path / "run")]))
    (head,) = re.findall(r"signal by environment (Environment .*?) mail ", page)
    measures = ("Pass rate", "Mixed", "Variance a prompt", "Steps with signal")
    for measure in measures:
        assert f"{measure}, run {measure}, lately" in head
    # Both of mail's prompts are mixed in all 8 steps; maps has one known grade a prompt.
    assert "mail 16 2 50.0 % 50.0 % 100.0 % 100.0 % 0.25 0.25 100.0 % 100.0 % 0.0 %" in page
    assert "expected share of mixed groups by their size, as it passed lately" in page


def test_scores_stand_beside_what_nothing_and_the_reference_earn(tmp_path: Path) -> None:
    run = empty_run(tmp_path / "run")
    groups = [
        *rewarded([1.0], n_tasks=3, env_key="mail"),
        *rewarded([0.0], n_tasks=1, env_key="maps"),
    ]
    tasks = [
        Task(key=g.task_key, env_key=g.env_key, prompt="x", difficulty=1 + n % 2)
        for n, g in enumerate(groups)
    ]
    idle = Baseline(null_rate=0.25, oracle_rate=None, vacuous=("mail-0",), impossible=())
    add_evaluation(
        run, "val", 4, groups, tasks=tasks, trained_envs={"mail"}, baselines={"mail": idle}
    )
    page = words(report_page([run]))
    assert re.search(rf"step 4 mail 3 3 0 100.0 % \S+ % to 100.0 % 25.0 % {NOTHING} ", page)
    assert "val: mail is vacuous: doing nothing passes 25.0% of it (mail-0)" in page
    assert "val, step 4 held out 1 1 0 0.0 %" in page
    assert "val, step 4 trained 3 3 0 100.0 %" in page
    assert "val, step 4 1 easy 2 2 0 100.0 %" in page
    assert "val, step 4 2 medium 2 2 0 50.0 %" in page


def test_a_damaged_file_costs_only_itself(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    folder = run.trajectories
    (folder / "eval" / "unseen" / "step_000008.jsonl.gz").write_bytes(b"no gzip")
    cut = folder / "train" / "step_000008.jsonl.gz"
    cut.write_bytes(cut.read_bytes()[:-20])
    gone = folder / "train" / "step_000001"
    gone.with_suffix(".index.jsonl").unlink()
    gone.with_suffix(".jsonl.gz").write_bytes(b"no gzip")
    page = words(report_page([run]))
    assert "step_000001.jsonl.gz at byte 0" in page
    assert "unseen at step 8 is left out: " in page
    assert "eval/unseen/8/0 is left out: " in page
    assert "train/8/4 is left out: " in page
    assert "42 training and 40 evaluation episodes" in page
    assert "▲ IMPROVED unseen" in page


def test_an_imported_run_says_what_is_not_recorded(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    (run.path / IMPORTED).write_text("dumped_evals\n")
    page = words(report_page([run]))
    assert "Imported from dumps, which record no configuration, tokens or times." in page
    assert "run: not recorded, it was imported." in page
    assert "trainer.seed" not in page


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


def test_a_run_that_shares_no_set_with_the_first_is_named(tmp_path: Path) -> None:
    other = empty_run(tmp_path / "other")
    add_evaluation(other, "val", 0, rewarded([1.0], n_tasks=4, env_key="mail"))
    runs = [small_run(tmp_path / "old"), other, empty_run(tmp_path / "none")]
    page = words(report_page(runs))
    assert (
        "A old and B other share no evaluation set and are not compared: A old has unseen; "
        "B other has val."
    ) in page
    assert "C none has none." in page
    add_evaluation(other, "unseen", 0, rewarded([1.0], n_tasks=4, env_key="mail"))
    assert "val was evaluated in B other only." in words(report_page(runs[:2]))


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


@pytest.mark.parametrize(("mini_batch", "is_told"), [(4, True), (2, False)])
def test_a_metric_that_cannot_move_is_said_to_be_one(
    mini_batch: int, is_told: bool, tmp_path: Path
) -> None:
    sizes = ("trainer.train_batch_size=4", f"trainer.policy_mini_batch_size={mini_batch}")
    page = words(report_page([empty_run(tmp_path / "run", *sizes)]))
    assert ("policy/ppo_clip_ratio stays 0" in page) == is_told


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
    folder = tmp_path / "pages"
    folder.mkdir()
    CliRunner().invoke(app, [str(run), "--output", str(folder)], catch_exceptions=False)
    assert (folder / "report.html").exists()
    with pytest.raises(ConfigError, match="is not a run folder"):
        CliRunner().invoke(app, [str(tmp_path)], catch_exceptions=False)


def test_the_configuration_is_the_one_the_run_had(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    page = unescape(report_page([run]))
    (shown,) = re.findall(r"<pre[^>]*>(.*?)</pre>", page, flags=re.DOTALL)
    (tmp_path / "shown.yaml").write_text(shown)
    assert load_config_file(str(tmp_path / "shown.yaml")) == run.config
