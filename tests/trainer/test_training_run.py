"""A whole training run, from a configuration to a complete run folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.fakes import moody_world
from tests.fakes.small_runs import rows, small_config

from skyfleet.config.loading import load_config_file
from skyfleet.envs import registry
from skyfleet.errors import NothingGradedError
from skyfleet.evaluation.model_selection import ModelSelection
from skyfleet.evaluation.report import EvalReport
from skyfleet.trainer import evaluation, training_run
from skyfleet.trainer.tasks import build_schedule
from skyfleet.trainer.training_run import run_training
from skyfleet.trajectories.archive import read_trajectories
from skyfleet.trajectories.trajectory import Ending
from skyfleet.worlds.catalog import generate_world_tasks


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    open_env = getattr(moody_world, request.param)
    monkeypatch.setitem(registry.ENV_CLASSES, "world", lambda _: open_env)


def attempts(folder: Path, step: int) -> list[tuple[Ending, float | None, str | None]]:
    path = folder / "trajectories" / "train" / f"step_{step:06d}.jsonl.gz"
    return [
        (t.ending, t.reward, t.failure.detail if t.failure else None)
        for t in read_trajectories(path)
    ]


async def test_a_run_writes_its_configuration_metrics_timings_episodes_checkpoints_and_results(
    tmp_path: Path,
) -> None:
    config = small_config(tmp_path)
    outcome = await run_training(config)
    assert load_config_file(tmp_path / "config.yaml") == config
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2, 3]
    assert [len(attempts(tmp_path, step)) for step in (1, 2, 3)] == [8, 8, 8]
    kept = (tmp_path / "trajectories/eval").rglob("*.jsonl.gz")
    evaluated = {(path.parent.name, path.name.split(".")[0]) for path in kept}
    steps = ("step_000000", "step_000002", "step_000003")
    assert evaluated == {(name, step) for name in ("unseen", "elsewhere") for step in steps}
    saved = {path.name for path in (tmp_path / "checkpoints").glob("global_step_*")}
    assert saved == {"global_step_0", "global_step_2", "global_step_3"}
    assert outcome.table == (tmp_path / "results.md").read_text()
    assert outcome.table is not None
    assert "unseen" in outcome.table
    assert "elsewhere" in outcome.table
    assert "<h1" in (tmp_path / "report.html").read_text()
    dumped = tmp_path / "exports/dumped_evals/global_step_3_evals/unseen"
    assert {path.name for path in dumped.iterdir()} == {"github.jsonl", "aggregated_results.jsonl"}
    assert not [key for row in rows(tmp_path) for key in row if key.startswith("timing/")]
    timing = [json.loads(line) for line in (tmp_path / "timing.jsonl").read_text().splitlines()]
    assert {"timing/step", "timing/generate", "timing/sync_weights"} <= timing[1].keys()


async def test_a_run_without_an_evaluation_set_trains_and_reports_no_scores(
    tmp_path: Path,
) -> None:
    assert (await run_training(small_config(tmp_path, "data.val_data=[]"))).table is None
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2, 3]
    assert "trainer/best_step" not in rows(tmp_path)[-1]


async def test_the_best_step_is_logged_reported_and_not_pruned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        evaluation,
        "select_best_step",
        lambda reports: ModelSelection(step=min(2, reports[-1].step), candidates=()),
    )
    outcome = await run_training(
        small_config(
            tmp_path,
            "trainer.max_ckpts_to_keep=1",
            "trainer.ckpt_interval=-1",
            "trainer.eval_interval=1",
        )
    )
    assert [row["trainer/best_step"] for row in rows(tmp_path)] == [0, 1, 2, 2]
    assert outcome.table is not None
    assert "Best step, by unseen: 2." in outcome.table
    saved = {path.name for path in (tmp_path / "checkpoints").glob("global_step_*")}
    assert saved == {"global_step_0", "global_step_2", "global_step_3"}


async def test_a_resumed_run_selects_the_best_step_from_all_evaluations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[list[int]] = []

    def last(reports: Sequence[EvalReport]) -> ModelSelection:
        compared.append([report.step for report in reports])
        return ModelSelection(step=reports[-1].step, candidates=())

    monkeypatch.setattr(evaluation, "select_best_step", last)
    await run_training(small_config(tmp_path))
    await run_training(
        small_config(tmp_path, "trainer.max_training_steps=5", "trainer.eval_interval=5")
    )
    assert compared[-1] == [0, 2, 3, 5]


async def test_a_failed_html_report_keeps_the_results_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("no ink")

    monkeypatch.setattr(training_run, "write_report", broken)
    outcome = await run_training(small_config(tmp_path, "trainer.max_training_steps=1"))
    assert outcome.table is not None
    assert "cannot write the report: no ink; try `skyfleet report" in caplog.text


@pytest.mark.parametrize("world", ["open_moody"], indirect=True)
@pytest.mark.usefixtures("world")
async def test_every_step_changes_the_weights_and_the_policy_version(tmp_path: Path) -> None:
    await run_training(small_config(tmp_path))
    checkpoints = [tmp_path / "checkpoints" / f"global_step_{step}" for step in (0, 2, 3)]
    weights = [load_file(c / "policy" / "model.safetensors") for c in checkpoints]
    for before, after in pairwise(weights):
        assert any(not before[name].equal(after[name]) for name in before)
    versions = [
        min(version for t in trajectory.transcripts for version in t.policy_versions)
        for step in (1, 2, 3)
        for trajectory in read_trajectories(
            tmp_path / "trajectories" / "train" / f"step_{step:06d}.jsonl.gz"
        )
    ]
    # Three warm-start steps, then one version per step.
    assert versions == [3] * 8 + [4] * 8 + [5] * 8
    assert all(row["policy/grad_norm"] > 0 for row in rows(tmp_path)[1:])
    assert rows(tmp_path)[1]["policy/policy_kl"] >= 0


async def test_a_batch_without_learning_signal_is_counted_and_leaves_the_policy_unchanged(
    tmp_path: Path,
) -> None:
    # A random policy never solves a real task, so every reward is zero.
    await run_training(small_config(tmp_path, "trainer.algorithm.zero_variance_filter=true"))
    first, last = (
        load_file(tmp_path / f"checkpoints/global_step_{step}/policy/model.safetensors")
        for step in (0, 3)
    )
    assert all(first[name].equal(last[name]) for name in first)
    assert [row["loss/num_samples"] for row in rows(tmp_path)[1:]] == [0.0, 0.0, 0.0]
    counts = {"filter/unknown_grade", "filter/too_few_graded", "filter/zero_variance"}
    assert all(counts <= row.keys() for row in rows(tmp_path)[1:])


@pytest.mark.parametrize("world", ["open_breaking"], indirect=True)
@pytest.mark.usefixtures("world")
async def test_a_failure_in_env_step_is_recorded_and_the_run_continues(
    tmp_path: Path,
) -> None:
    await run_training(small_config(tmp_path))
    every = [attempt for step in (1, 2, 3) for attempt in attempts(tmp_path, step)]
    broken = (Ending.FAILED, None, "step: OSError: the database is gone")
    assert broken in every
    assert any(reward is not None for _, reward, _ in every)
    unknown = sum(row["filter/unknown_grade"] for row in rows(tmp_path)[1:])
    assert unknown == sum(reward is None for _, reward, _ in every)


@pytest.mark.parametrize("world", ["open_ungradable"], indirect=True)
@pytest.mark.usefixtures("world")
async def test_a_broken_verifier_gives_unknown_grades_and_the_run_continues(tmp_path: Path) -> None:
    await run_training(small_config(tmp_path))
    every = [attempt for step in (1, 2, 3) for attempt in attempts(tmp_path, step)]
    unknown = [ending for ending, _, detail in every if detail == "the verifier is broken"]
    assert unknown
    assert all(reward is None for _, reward, detail in every if detail)
    counted = sum(row["reward/unknown_grades"] for row in rows(tmp_path)[1:])
    assert counted == len(unknown)


@pytest.mark.parametrize("world", ["open_chatty"], indirect=True)
@pytest.mark.usefixtures("world")
async def test_a_reply_longer_than_the_context_ends_the_episode_which_is_still_trained(
    tmp_path: Path,
) -> None:
    await run_training(small_config(tmp_path))
    every = [attempt for step in (1, 2, 3) for attempt in attempts(tmp_path, step)]
    assert any(ending is Ending.CONTEXT_FULL for ending, _, _ in every)
    assert all(row["loss/num_samples"] == 8 for row in rows(tmp_path)[1:])


def write_ungradable_tasks(folder: Path) -> Path:
    """Write tasks whose verifiers fail to a file."""
    tasks = [
        task.model_copy(update={"verifier_code": "def verify(env): return 1 / 0"})
        for task in generate_world_tasks("github", split="train", count=4)
    ]
    file = folder / "tasks.jsonl"
    file.write_text("\n".join(task.model_dump_json() for task in tasks))
    return file


async def test_an_evaluation_without_grades_prints_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_ungradable_tasks(tmp_path)
    settings = (f"data.val_data={{v: [{file}]}}", "data.allow_unmanifested=true")
    run_config = small_config(tmp_path / "run", *settings, "data.allow_overlap=true")
    with pytest.raises(NothingGradedError, match=r"set v: no attempt could be graded, .*Verifier"):
        await run_training(run_config)
    assert (tmp_path / "run/checkpoints/global_step_0").is_dir()
    capsys.readouterr()
    warn = "trainer.sentinels.modes.nothing_graded=warn"
    await run_training(small_config(tmp_path / "run", *settings, "data.allow_overlap=true", warn))
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("v: ")]
    assert "attempts have no grade; the first: VerifierError: verifier_code failed" in notes[0]


def test_more_steps_than_the_epochs_allow_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    epochs = ("trainer.epochs=2", "trainer.train_batch_size=2", "trainer.policy_mini_batch_size=2")
    few, many = (small_config(tmp_path, *epochs, f"trainer.max_training_steps={n}") for n in (4, 9))
    assert build_schedule(few, n_tasks=4).total_steps == 4
    assert not caplog.records
    assert build_schedule(many, n_tasks=4).total_steps == 4
    assert "max_training_steps=9 is not reached: trainer.epochs=2 is only 4" in caplog.text


async def test_ungradable_tasks_are_run_and_counted(tmp_path: Path) -> None:
    file = write_ungradable_tasks(tmp_path)
    await run_training(
        small_config(
            tmp_path / "run",
            f"data.train_data=[{file}]",
            "data.allow_unmanifested=true",
            "trainer.warm_start.steps=0",
            "trainer.sentinels.modes.nothing_graded=warn",
        )
    )
    assert [row["reward/unknown_grades"] for row in rows(tmp_path / "run")[1:]] == [8.0] * 3


async def test_the_curriculum_counts_attempts_and_is_checkpointed(tmp_path: Path) -> None:
    await run_training(small_config(tmp_path, "trainer.curriculum=true"))
    saved = json.loads((tmp_path / "checkpoints/global_step_3/data/state.json").read_text())
    assert saved["n_batches"] == 3
    assert sum(map(sum, saved["curriculum"]["counts"].values())) > 0
