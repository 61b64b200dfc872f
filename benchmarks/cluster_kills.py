"""Kill the processes of runs over Ray at random; each run must end with an undisturbed run's numbers.

`python -m benchmarks.cluster_kills --count 40`, from the repository's root. Every run has two engine
actors and two rollout workers; every third has a sharded learner of two ranks instead of one in the
driver.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

N_STEPS = 12
RAY = (
    f"trainer.max_training_steps={N_STEPS}",
    "trainer.eval_interval=6",
    "trainer.ckpt_interval=2",
    "trainer.warm_start.steps=40",
    "generator.sampling_params.max_generate_length=40",
    "generator.sampling_params.stop=[]",
    "trainer.algorithm.use_entropy_loss=true",
    "trainer.policy.optimizer_config.lr=1e-3",
)
ACTORS = (
    "trainer.placement.use_ray=true",
    "trainer.placement.colocate_all=false",
    "generator.num_rollout_workers_per_node=2",
    "generator.num_inference_engines=2",
)
RANKS = ("trainer.strategy=fsdp", "trainer.placement.policy_num_gpus_per_node=2")
TARGETS = {
    "rollout worker": "ray::RolloutWorker",
    "engine": "ray::EmbeddedEngineActor",
    "learner rank": "ray::RankActor",
    "driver": "",
}
CLEAN_SECONDS, RUN_SECONDS = 60.0, 600.0
CHILD = """
import asyncio, sys
from pathlib import Path
from tests.fakes.small_runs import small_config
from skyfleet.trainer.training_run import run_training
asyncio.run(run_training(small_config(Path(sys.argv[1]), *sys.argv[2:])))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng, kills = random.Random(arguments.seed), Counter[str]()
    with tempfile.TemporaryDirectory() as temporary:
        folder, number, findings = Path(temporary), 0, list[str]()
        expected = folder / "undisturbed"
        finish(start(expected, RAY))
        while kills.total() < arguments.count:
            extra, number = (RANKS if number % 3 == 2 else ()), number + 1
            before = time.monotonic()
            n_before, run = kills.total(), folder / f"run{number}"
            left = disturb(run, (*RAY, *ACTORS, *extra), rng, kills)
            problems = [*compare(run, expected), *left]
            findings += problems
            seconds = time.monotonic() - before
            print(
                f"run {number}: {kills.total() - n_before} kills in {seconds:.0f} s, "
                f"{len(problems)} problems {problems}",
                flush=True,
            )
    print("| killed | times |\n|---|---|")
    for name, times in kills.items():
        print(f"| {name} | {times} |")
    print(f"{kills.total()} kills, {len(findings)} problems")
    sys.exit(bool(findings))


def start(folder: Path, overrides: Sequence[str]) -> subprocess.Popen[bytes]:
    with (folder.parent / f"{folder.name}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-c", CHILD, str(folder), *overrides],
            env=os.environ | {"RAY_AUTH_MODE": "disabled"},
            stdout=log,
            stderr=log,
        )


def finish(process: subprocess.Popen[bytes]) -> None:
    if code := process.wait(RUN_SECONDS):
        raise SystemExit(f"a run that nobody disturbed ended with {code}")


def disturb(
    folder: Path, overrides: Sequence[str], rng: random.Random, kills: Counter[str]
) -> list[str]:
    """Run to the end with kills between the steps' first and last; returns what was left behind."""
    problems: list[str] = []
    process, deadline, n_driver = start(folder, overrides), time.monotonic() + RUN_SECONDS, 0
    while process.poll() is None:
        time.sleep(rng.uniform(0.3, 2.0))
        if time.monotonic() > deadline:
            problems.append("it did not end")
            problems += kill_driver(process)
            break
        if not 0 < count_rows(folder) <= N_STEPS:
            continue
        names = ["rollout worker"] * 4 + ["engine"] * 3 + ["learner rank"]
        name = rng.choice([*names, *(["driver"] if n_driver < 2 else [])])
        if name == "driver":
            problems += kill_driver(process)
            process, n_driver = start(folder, overrides), n_driver + 1
            kills[name] += 1
        elif pids := find_actors(process.pid, TARGETS[name]):
            os.kill(rng.choice(pids), signal.SIGKILL)
            kills[name] += 1
    if process.poll():
        problems.append(f"it ended with {process.poll()}: see {folder}.log")
    return problems


def find_actors(driver: int, title: str) -> list[int]:
    found = []
    for child in psutil.Process(driver).children(recursive=True):
        try:
            if child.cmdline() and child.cmdline()[0].startswith(title):
                found.append(child.pid)
        except psutil.Error:
            continue
    return found


def kill_driver(process: subprocess.Popen[bytes]) -> list[str]:
    """Everything that it started must end by itself."""
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(children, timeout=CLEAN_SECONDS)
    for child in alive:
        child.kill()
    return [f"{len(alive)} processes outlived the driver"] if alive else []


def compare(folder: Path, expected: Path) -> list[str]:
    """What differs from the undisturbed run."""
    problems: list[str] = []
    rows, others = read_rows(folder), read_rows(expected)
    steps = [row["trainer/global_step"] for row in rows]
    if steps != [row["trainer/global_step"] for row in others]:
        return [f"steps {steps}"]
    for row, other in zip(rows, others, strict=True):
        for key, value in other.items():
            if is_compared(key) and not is_close(row.get(key), value):
                problems.append(f"step {row['trainer/global_step']}: {key} {row.get(key)} {value}")
    for step in range(1, N_STEPS + 1):
        played, others_played = list_places(folder, step), list_places(expected, step)
        if played != others_played:
            problems.append(f"step {step}: trained on {played} instead of {others_played}")
    return problems[:5]


def read_rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def count_rows(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def is_compared(key: str) -> bool:
    return not key.startswith(("timing/", "weight_sync/")) and "logprobs_abs_diff" not in key


def is_close(value: Any, expected: Any) -> bool:
    if not isinstance(value, float) or not isinstance(expected, float):
        return bool(value == expected)
    return abs(value - expected) <= 1e-5 + 2e-3 * abs(expected)


def list_places(folder: Path, step: int) -> list[tuple[str, int]]:
    from skyfleet.trajectories.archive import read_trajectories, train_path

    path = train_path(folder / "trajectories", step)
    return sorted((t.task_key, t.sample) for t in read_trajectories(path))


if __name__ == "__main__":
    main()
