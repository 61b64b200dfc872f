"""A sweep that is killed continues: nothing is repeated, and the interrupted run resumes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.fakes.small_runs import SETTINGS

from skyfleet.sweeps.record import read_record

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 900.0
OVERRIDES = (
    'data.val_data=["world:github?split=unseen_tasks&count=3"]',
    "trainer.max_training_steps=20",
    "trainer.eval_interval=10",
)
SWEEP = ("sweep", "small.yaml", "trainer.algorithm.kl_loss_coef=0.01,0.1", *OVERRIDES)
FIRST, SECOND = (f"small-kl_loss_coef-kl_loss_coef-{value}-seed42" for value in ("0.01", "0.1"))


def start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "skyfleet.cli.main", *arguments]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE)


def finish(folder: Path, *arguments: str) -> str:
    process = start(folder, *arguments)
    output, _ = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 0, output.decode()
    return output.decode()


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert process.poll() is None, "the sweep ended by itself"
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda one: one.name
)
def test_a_killed_sweep_resumes_the_interrupted_run_and_repeats_nothing(
    tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "small.yaml").write_text(SETTINGS)
    sweep = tmp_path / "runs/small-kl_loss_coef"
    killed = start(tmp_path, *SWEEP, "--seeds", "1")
    wait_for(lambda: (sweep / SECOND / "checkpoints/global_step_2").is_dir(), killed)
    killed.send_signal(number)
    killed.communicate(timeout=LIMIT_SECONDS)
    assert killed.returncode == (-9 if number is signal.SIGKILL else 128 + number)
    record = read_record(sweep)
    assert record.get(FIRST).state == "finished"
    assert record.get(SECOND).state == "started"
    first_log = (sweep / f"{FIRST}.log").read_bytes()

    output = finish(tmp_path, *SWEEP, "--seeds", "1")

    assert f"run 1 of 2, {FIRST}: finished earlier" in output
    assert (sweep / f"{FIRST}.log").read_bytes() == first_log
    assert "setting up: resuming" in (sweep / f"{SECOND}.log").read_text()
    assert read_record(sweep).get(SECOND).state == "finished"
    settings = ("trainer.algorithm.kl_loss_coef=0.1", "trainer.seed=42", "trainer.run_name=alone")
    finish(tmp_path, "train", "small.yaml", *OVERRIDES, *settings)
    rows = (sweep / SECOND / "metrics.jsonl").read_text().splitlines()
    assert rows == (tmp_path / "runs/alone/metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == list(range(21))
    assert "NO EVIDENCE" in output or "FAILING" in output or "UNDERPOWERED" in output
