"""Setting up a run prints one progress line per slow part."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.small_runs import SETTINGS
from typer.testing import CliRunner

from skyfleet.cli.main import app
from skyfleet.errors import ConfigError
from skyfleet.rollouts.episode import collect
from skyfleet.trainer import rollouts


def train_lines(folder: Path, *args: str) -> list[str]:
    file = folder / "run.yaml"
    file.write_text(SETTINGS)
    short = ("trainer.max_training_steps=1", "data.val_data=[]", f"trainer.run_path={folder}/run")
    result = CliRunner().invoke(app, ["train", str(file), *short, *args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


def test_set_up_progress_is_printed_before_the_first_step(tmp_path: Path) -> None:
    lines = train_lines(tmp_path)
    assert lines[:4] == [
        "setting up: loading torch and transformers",
        "setting up: loading the training and evaluation tasks",
        "setting up: loading the policy: tiny",
        "setting up: rolling out 4 reference solutions for the warm start",
    ]
    assert any(line.startswith("warm start 3/3") for line in lines[4:])


def test_without_a_warm_start_no_reference_solution_is_run(tmp_path: Path) -> None:
    lines = train_lines(tmp_path, "trainer.warm_start.steps=0")
    lines = [line for line in lines if line.startswith("setting up: ")]
    assert lines[-1] == "setting up: loading the policy: tiny"


def test_a_resumed_run_prints_that_first_and_skips_the_finished_warm_start(tmp_path: Path) -> None:
    train_lines(tmp_path)
    lines = train_lines(tmp_path, "trainer.max_training_steps=2")
    saved = tmp_path / "run" / "checkpoints" / "global_step_1"
    assert [line for line in lines if line.startswith("setting up: ")] == [
        f"setting up: resuming test_run at step 1 from {saved}",
        "setting up: loading torch and transformers",
        "setting up: loading the training and evaluation tasks",
        f"setting up: loading the policy: {saved}/policy",
    ]
    assert lines[0].startswith("setting up: resuming")


def test_a_dry_run_resumes_or_fails_as_the_run_would(tmp_path: Path) -> None:
    train_lines(tmp_path)
    before = files(tmp_path)
    saved = tmp_path / "run" / "checkpoints" / "global_step_1"
    assert f"# resuming test_run at step 1 from {saved}" in train_lines(tmp_path, "--dry-run")
    for word, sentence in (
        ("trainer.seed=7", "was started with trainer.seed=42 and this run has 7"),
        ("trainer.resume_mode=none", "already holds a run"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            train_lines(tmp_path, word, "--dry-run")
    assert files(tmp_path) == before


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: signal.Signals
) -> None:
    original_collect = collect

    async def terminate_third(*args: Any, **more: Any) -> Any:
        calls.append(None)
        if len(calls) == 3:
            os.kill(os.getpid(), sent)
            await asyncio.sleep(10)
        return await original_collect(*args, **more)

    calls: list[None] = []
    monkeypatch.setattr(rollouts, "collect", terminate_third)
    file = tmp_path / "run.yaml"
    file.write_text(SETTINGS)
    args = ["trainer.max_training_steps=5", "data.val_data=[]", f"trainer.run_path={tmp_path}/run"]
    result = CliRunner().invoke(app, ["train", str(file), *args, "trainer.ckpt_interval=100"])
    assert result.exit_code == 128 + sent, result.output
    assert "global_step_2" in result.output
    assert (tmp_path / "run" / "checkpoints" / "global_step_2").is_dir()
