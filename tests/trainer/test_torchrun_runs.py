"""Runs that torchrun starts: the numbers of one learner, and one that is killed and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.exhaustive

SETTINGS = (
    "data.train_data=['world:booking?split=train&count=200&max_difficulty=1']",
    "data.val_data={}",
    "data.held_out_envs=[]",
    "trainer.max_training_steps=3",
    "trainer.warm_start.steps=60",
    "trainer.eval_interval=-1",
    "trainer.eval_before_train=false",
    "trainer.ckpt_interval=1",
    "trainer.train_batch_size=8",
    "trainer.policy_mini_batch_size=4",
    "trainer.max_tokens_per_microbatch=2048",
    # Something to learn, also while every attempt fails.
    "trainer.algorithm.zero_variance_filter=false",
    "trainer.algorithm.use_kl_loss=true",
    "trainer.algorithm.use_entropy_loss=true",
)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def command(folder: Path, *, n_ranks: int) -> list[str]:
    paths = [f"trainer.{name}_path={folder}{end}" for name, end in PATHS.items()]
    ranks = TORCHRUN if n_ranks > 1 else ()
    strategy = ["trainer.strategy=fsdp"] if n_ranks > 1 else []
    return [sys.executable, *ranks, "-m", "skyfleet", "train", "tiny", *SETTINGS, *strategy, *paths]


PATHS = {"run": "", "ckpt": "/checkpoints", "export": "/exports"}


def read_rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def run(arguments: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        arguments, env=environment, capture_output=True, text=True, timeout=600, **options
    )


def check_same_numbers(folder: Path, expected: Path) -> None:
    rows, of_one = read_rows(folder), read_rows(expected)
    assert len(rows) == len(of_one) == 4
    for row, one in zip(rows, of_one, strict=True):
        names = {name for name in one if name.startswith(("policy/", "loss/", "generation/"))}
        numbers = {name: one[name] for name in names if one[name] is not None}
        ours = {name: row[name] for name in numbers}
        assert ours == pytest.approx(numbers, rel=1e-3, abs=1e-4)


def test_three_steps_on_two_ranks_and_a_killed_rank(tmp_path: Path) -> None:
    one, two, killed = tmp_path / "one", tmp_path / "two", tmp_path / "killed"
    for folder, n_ranks in ((one, 1), (two, 2)):
        ended = run(command(folder, n_ranks=n_ranks))
        assert ended.returncode == 0, ended.stderr[-3000:]
    check_same_numbers(two, one)
    policy = two / "checkpoints" / "global_step_3" / "policy"
    assert AutoModelForCausalLM.from_pretrained(policy).config.num_hidden_layers == 2

    ended_early = kill_a_rank(command(killed, n_ranks=2), killed)
    assert "rank 1 of the learner died" in ended_early
    resumed = run(command(killed, n_ranks=2))
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    check_same_numbers(killed, one)


def kill_a_rank(arguments: list[str], folder: Path) -> str:
    """Kill rank 1 after the first step is saved; returns what the run printed."""
    started = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        saved = folder / "checkpoints" / "global_step_1" / "manifest.json"
        deadline = time.monotonic() + 300
        while not saved.exists() and time.monotonic() < deadline:
            assert started.poll() is None, "the run ended before its first checkpoint"
            time.sleep(0.2)
        ranks = psutil.Process(started.pid).children()
        rank_1 = next(p for p in ranks if p.environ().get("RANK") == "1")
        os.kill(rank_1.pid, signal.SIGKILL)
        output, _ = started.communicate(timeout=120)
        assert not [p for p in ranks if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        return output
    finally:
        started.kill()
        started.wait()
