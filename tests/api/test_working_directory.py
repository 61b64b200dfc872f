"""An environment that changes the working directory neither moves nor breaks the run."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import skyfleet as sf
from skyfleet.storage import working_directory

TASKS = [{"prompt": f"Say {n}.", "key": f"say-{n}"} for n in range(4)]
SMALL: dict[str, Any] = {
    "eval": False,
    "steps": 2,
    "batch_size": 2,
    "algorithm": sf.GRPO(group_size=2, kl=0),
    "sampling": sf.Sampling(max_tokens=4),
}
KEYS = {
    "trainer.policy.model_config_kwargs": {"hidden_size": 32, "num_hidden_layers": 1},
    "trainer.ckpt_interval": 1,
    "trainer.hf_save_interval": 1,
}


@pytest.fixture(autouse=True)
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(working_directory, "_warned", False)
    folder = tmp_path / "start"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def move(answer: str) -> float:
    os.chdir(tempfile.gettempdir())
    return float(len(answer) % 2)


def move_and_remove(answer: str) -> float:
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    shutil.rmtree(folder)
    return float(len(answer) % 2)


@pytest.mark.parametrize(
    "reward", [pytest.param(move, marks=pytest.mark.exhaustive), move_and_remove]
)
def test_a_run_stays_in_the_folder_where_it_started(
    reward: Callable[[str], float],
    start: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    arguments = {**SMALL, "tasks": TASKS, "run_dir": "runs/moved", "config": KEYS}
    result = sf.train("tiny", reward=reward, **arguments)
    folder = start / "runs" / "moved"
    assert result.folder == folder
    assert (result.step, list(result.run.checkpoints)) == (2, [0, 1, 2])
    assert (folder / "exports" / "global_step_2" / "policy").is_dir()
    assert (folder / "report.html").is_file()
    assert not (folder / ".lock").exists()
    recorded = yaml.safe_load((folder / "config.yaml").read_text())["trainer"]
    assert recorded["run_path"] == "runs/moved"
    warnings = [r.message for r in caplog.records if "the working directory changed" in r.message]
    assert len(warnings) == 1
    assert str(start) in warnings[0]
    assert "environment.isolation=process" in warnings[0]

    monkeypatch.chdir(start)
    resumed = sf.train("tiny", reward=lambda answer: 0.0, **{**arguments, "steps": 3})
    assert (resumed.folder, resumed.step) == (Path("runs/moved"), 3)


def test_an_evaluation_writes_to_the_folder_where_it_started(start: Path) -> None:
    sf.evaluate("null", reward=move, tasks=TASKS, output="results")
    assert (start / "results" / "reports" / "step_000000" / "val.json").is_file()


def test_a_relative_folder_in_a_removed_working_directory_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(sf.ConfigError, match="'runs/lost' is relative, and the working directory"):
        sf.train("tiny", reward=move, tasks=TASKS, run_dir="runs/lost", **SMALL)
