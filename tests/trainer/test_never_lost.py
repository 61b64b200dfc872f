"""Whatever ends a run, the same command goes on, and the result is that of an uninterrupted run."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.fakes import failing_loss
from tests.fakes.crash_runs import SETTINGS, describe_run, install_env, list_differences
from tests.fakes.small_runs import rows
from tests.trainer.interrupting import interrupt_training

from skyfleet.checkpoints.resume import find_checkpoint
from skyfleet.config.loading import load_config
from skyfleet.config.root import RunConfig
from skyfleet.envs import registry
from skyfleet.errors import CheckpointError, ConfigError, SkyfleetError
from skyfleet.learner.optimizer import Optimizer
from skyfleet.tracking.jsonl_tracker import JsonlTracker
from skyfleet.trainer.assemble import GivenObjects
from skyfleet.trainer.callbacks import Callbacks, StepResult
from skyfleet.trainer.exports import Exports
from skyfleet.trainer.loop import train_steps
from skyfleet.trainer.resuming import find_resume_checkpoint
from skyfleet.trainer.training_run import open_training_run, run_training

SHORT = (
    *("trainer.max_training_steps=2", "trainer.ckpt_interval=1", "trainer.hf_save_interval=1"),
    *("trainer.eval_interval=2", "trainer.warm_start.steps=1"),
)
ROLLOUT = "skyfleet.trainer.rollouts:collect"
LOSS = "trainer.algorithm.policy_loss_type=tests.fakes.failing_loss:fail_sometimes"


@pytest.fixture(autouse=True, scope="module")
def _uncertain() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.ENV_CLASSES, "world", registry.ENV_CLASSES["world"])
        install_env()
        yield


def config(folder: Path, *overrides: str) -> RunConfig:
    return load_config(SETTINGS, [*SHORT, f"trainer.run_path={folder}/run", *overrides])


@pytest.fixture(scope="module")
def straight(_uncertain: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    asyncio.run(run_training(config(folder)))
    return folder


@pytest.fixture(scope="module")
def expected(straight: Path) -> dict[str, Any]:
    return describe_run(straight)


@pytest.fixture(scope="module")
def killed(
    _uncertain: None, straight: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Copies of a run folder just before each of its renames, by the name of what is renamed."""
    folder, copies = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("killed")
    taken: dict[str, Path] = {}

    def copying(rename: Callable[..., None]) -> Callable[..., None]:
        def copy_and_rename(source: Any, target: Any, **more: Any) -> None:
            if Path(target).is_relative_to(folder):
                label = str(Path(target).relative_to(folder))
                taken[label] = copies / str(len(taken))
                shutil.rmtree(taken[label], ignore_errors=True)
                shutil.copytree(folder, taken[label])
            rename(source, target, **more)

        return copy_and_rename

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", copying(os.rename))
        patch.setattr(os, "replace", copying(os.replace))
        asyncio.run(run_training(config(folder)))
    return taken


@pytest.mark.parametrize(
    "label",
    [
        "run/checkpoints/global_step_0",  # between the first row and the first checkpoint
        "run/exports/global_step_1/policy",  # the checkpoint is saved and its export is not
        "run/reports/step_000002/unseen.json",  # the replayed evaluation is stored already
        "run/results.md",
    ],
)
async def test_a_run_killed_anywhere_goes_on_with_the_same_command(
    expected: dict[str, Any], killed: dict[str, Path], tmp_path: Path, label: str
) -> None:
    assert (killed[label] / "run" / ".lock").exists()
    move_run(killed[label], tmp_path)
    sentences: list[str] = []
    await run_training(config(tmp_path), on_progress=sentences.append)
    assert list_differences(expected, describe_run(tmp_path)) == []
    starts_over = label == "run/checkpoints/global_step_0"
    assert ("was stopped before its first checkpoint" in sentences[0]) == starts_over


def list_paths(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def move_run(copied: Path, folder: Path) -> None:
    """Copy a killed run, and put its new place into its configuration."""
    shutil.copytree(copied, folder, dirs_exist_ok=True)
    text = (folder / "run" / "config.yaml").read_text()
    (line,) = [line for line in text.splitlines() if line.strip().startswith("run_path:")]
    old = line.partition("run_path: ")[2]
    (folder / "run" / "config.yaml").write_text(text.replace(old, f"{folder}/run"))


async def test_a_run_stopped_before_its_first_checkpoint_is_still_one_run(
    killed: dict[str, Path], tmp_path: Path
) -> None:
    move_run(killed["run/checkpoints/global_step_0"], tmp_path)
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    for other, sentence in (
        ("trainer.seed=7", "was started with trainer.seed=42 and this run has 7"),
        ("trainer.resume_mode=none", "already holds a run"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            await run_training(config(tmp_path, other))
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


async def test_a_finished_run_without_its_checkpoints_is_not_started_over(
    straight: Path, tmp_path: Path
) -> None:
    move_run(straight, tmp_path)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(ConfigError, match=r"already holds a run of 2 steps, .*has none of its ch"):
        await run_training(config(tmp_path))
    assert len(rows(tmp_path / "run")) == 3


async def test_a_resumed_run_removes_later_records_and_reports_missing_rows(
    straight: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    move_run(straight, tmp_path)
    run = tmp_path / "run"
    kept = '{"step": 2, "sentinel": "filters"}\n'
    (run / "sentinels.jsonl").write_text(kept + kept.replace("2", "3") + '{"step"')
    first, *later = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(first + later[1])
    for path in ("trajectories/train/step_000002.jsonl.gz", "reports/step_000002/unseen.json"):
        later_path = run / path.replace("000002", "000003")
        later_path.parent.mkdir(exist_ok=True)
        shutil.copy(run / path, later_path)
    with caplog.at_level(logging.WARNING):
        await run_training(config(tmp_path))
    assert (run / "sentinels.jsonl").read_text() == kept
    assert list(run.rglob("*000003*")) == []
    assert (run / "trajectories" / "train" / "step_000002.jsonl.gz").exists()
    assert "no row for 1 of the steps before step 3, the first is step 1" in caplog.text
    # Not one row is left.
    (run / "metrics.jsonl").write_text("")
    (run / "timing.jsonl").unlink()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        await run_training(config(tmp_path))
    for name in ("metrics.jsonl", "timing.jsonl"):
        sentence = f"{name} has no row for 3 of the steps before step 3, the first is step 0"
        assert sentence in caplog.text


async def test_a_second_process_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    async with open_training_run(config(tmp_path)) as run:
        before = list_paths(tmp_path)
        with pytest.raises(ConfigError, match=r"run is in use by another run \(process \d+ on "):
            await run_training(config(tmp_path))
        # Another run folder, and the same checkpoints.
        shared = config(tmp_path / "other", f"trainer.ckpt_path={tmp_path}/run/checkpoints")
        with pytest.raises(ConfigError, match="checkpoints is in use"):
            await run_training(shared)
        assert list_paths(tmp_path) == before
        run.save()


async def test_the_same_command_resumes_a_killed_run_that_began_from_a_checkpoint(
    straight: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fork(step: int) -> RunConfig:
        path = straight / "run" / "checkpoints" / f"global_step_{step}"
        overrides = ("trainer.resume_mode=from_path", f"trainer.resume_path={path}")
        return config(tmp_path, "trainer.max_training_steps=3", "data.val_data=[]", *overrides)

    async with open_training_run(fork(1)) as run:
        await anext(train_steps(run))
    with pytest.raises(ConfigError, match=r"is step 0 and .*global_step_2 is later; move it away"):
        await run_training(fork(0))
    sentences: list[str] = []
    await run_training(fork(1), on_progress=sentences.append)
    own = tmp_path / "run" / "checkpoints"
    assert sentences[0].endswith(f"at step 2 from {own / 'global_step_2'}")
    assert [row["step"] for row in rows(tmp_path / "run")] == [2, 3]
    assert "has no row" not in caplog.text
    for folder in own.glob("global_step_*"):
        shutil.rmtree(folder)
    assert find_resume_checkpoint(fork(1)) is not None, "resume_path, as at the first start"


async def test_a_resumed_run_may_use_less_memory(straight: Path, tmp_path: Path) -> None:
    move_run(straight, tmp_path)
    changed = (
        *("trainer.max_tokens_per_microbatch=1100", "trainer.gradient_checkpointing=true"),
        *("trainer.policy.optimizer_config.offload_after_step=true", "generator.max_num_seqs=4"),
        *("trainer.loss_chunk_size=64", "generator.max_num_batched_tokens=2048"),
        *("environment.isolation=thread", "environment.verifier.allow_unconfined=true"),
    )
    await run_training(config(tmp_path, "trainer.max_training_steps=3", *changed))
    assert [row["step"] for row in rows(tmp_path / "run")] == [0, 1, 2, 3]


async def test_a_process_that_lost_its_folder_writes_nothing_more(tmp_path: Path) -> None:
    async with open_training_run(config(tmp_path, "trainer.ckpt_interval=-1")) as run:
        steps = train_steps(run)
        await anext(steps)
        lock = tmp_path / "run" / ".lock"
        lock.write_text(json.dumps(json.loads(lock.read_text()) | {"token": "another"}))
        before = {path: path.stat().st_mtime_ns for path in list_paths(tmp_path)}
        with pytest.raises(CheckpointError, match="was taken over by process"):
            await anext(steps)
        assert {path: path.stat().st_mtime_ns for path in list_paths(tmp_path)} == before
    assert lock.exists(), "it is the lock of the other process now"


async def test_a_damaged_checkpoint_is_never_loaded(
    straight: Path,
    expected: dict[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    move_run(straight, tmp_path)
    file = tmp_path / "run" / "checkpoints" / "global_step_2" / "policy" / "optimizer.pt"
    file.write_bytes(bytes(reversed(file.read_bytes())))
    with pytest.raises(CheckpointError, match=r"resume_strict=true .*optimizer\.pt has changed"):
        await run_training(config(tmp_path, "trainer.resume_strict=true"))
    with caplog.at_level(logging.WARNING):
        await run_training(config(tmp_path))
    assert "resuming from global_step_1 instead: " in caplog.text
    assert list_differences(expected, describe_run(tmp_path)) == []


@pytest.mark.parametrize("is_within_update", [False, True])
async def test_an_error_in_a_loss_saves_what_was_learnt_and_names_the_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_within_update: bool
) -> None:
    """One update of the warm start and two per step; the second step fails before or between its."""
    n_updates, apply = 0, Optimizer.apply

    def count_and_apply(optimizer: Optimizer) -> float:
        nonlocal n_updates
        n_updates += 1
        return apply(optimizer)

    run = config(tmp_path, LOSS, "trainer.ckpt_interval=-1", "data.val_data=[]")
    with monkeypatch.context() as patch:
        patch.setattr(Optimizer, "apply", count_and_apply)
        patch.setattr(failing_loss, "must_fail", lambda: n_updates == 3 + is_within_update)
        with pytest.raises(ZeroDivisionError) as caught:
            await run_training(run)
    notes = "\n".join(caught.value.__notes__)
    assert "samples: task github-" in notes
    assert "training step 2 failed: " in notes
    assert "global_step_1 holds" in notes
    assert ("part of its update" in notes) == is_within_update
    # Weights that were trained on a part of the step's episodes never meet them again.
    journal = tmp_path / "run" / "journal" / "step_000002.jsonl"
    assert journal.exists() == (not is_within_update)
    saved = find_checkpoint(tmp_path / "run" / "checkpoints", "latest")
    assert saved is not None
    assert saved.step == 1


async def test_an_error_in_a_callback_saves_the_step_and_the_run_ends_as_without_it(
    expected: dict[str, Any], tmp_path: Path
) -> None:
    def fail(result: StepResult) -> None:
        raise LookupError("no such table")

    with pytest.raises(LookupError) as caught:
        await run_training(config(tmp_path), given=GivenObjects(callbacks=Callbacks(on_step=fail)))
    assert caught.value.__notes__[0] == "raised by on_step on step 1"
    assert "global_step_1 holds everything learnt" in caught.value.__notes__[1]
    await run_training(config(tmp_path))
    assert list_differences(expected, describe_run(tmp_path)) == []


def fail_once(error: Exception, function: Callable[..., Any], *, call: int) -> Callable[..., Any]:
    calls = count(1)

    def call_or_fail(*args: Any) -> Any:
        if next(calls) == call:
            raise error
        return function(*args)

    return call_or_fail


@pytest.mark.parametrize("name", ["export_policy", "sync"])
async def test_an_error_after_the_row_is_logged_does_not_log_it_again(
    expected: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Exports begin at step 1, and each save from step 0 on syncs the rows first."""
    owner, call = (Exports, 1) if name == "export_policy" else (JsonlTracker, 2)
    error = PermissionError(13, "Permission denied")
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail_once(error, getattr(owner, name), call=call))
        with pytest.raises(PermissionError) as caught:
            await run_training(config(tmp_path))
    (note,) = caught.value.__notes__
    assert note.startswith("saving or exporting step 1 failed: ")
    await run_training(config(tmp_path))
    assert list_differences(expected, describe_run(tmp_path)) == []


async def test_an_export_that_was_moved_away_is_written_again(
    expected: dict[str, Any], tmp_path: Path
) -> None:
    await interrupt_training(config(tmp_path), ROLLOUT, call=2, loops=3)
    shutil.rmtree(tmp_path / "run" / "exports" / "global_step_1")
    await run_training(config(tmp_path))
    assert list_differences(expected, describe_run(tmp_path)) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    yield disk
    # Lazily: a model that was loaded from it maps its files.
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def resize(disk: Path, kilobytes: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={kilobytes}k", str(disk)], check=True)


async def test_a_full_disk_is_one_sentence_and_the_run_goes_on_when_there_is_space(
    expected: dict[str, Any], small_disk: Path
) -> None:
    """The disk grows a little after each failure, so that every kind of file meets its end."""
    sentences: list[str] = []
    for kilobytes in (8, 64, 150, 300, 4000):
        resize(small_disk, kilobytes)
        try:
            await run_training(config(small_disk))
        except SkyfleetError as error:
            sentences.append(str(error))
    assert len(sentences) == 4
    for sentence in sentences:
        assert "No space left on device (" in sentence
        assert "free some space and run the same command again: " in sentence
        assert "\n" not in sentence
    assert list_differences(expected, describe_run(small_disk)) == []
