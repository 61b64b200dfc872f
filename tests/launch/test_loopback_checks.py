"""`benchmarks.loopback` fails if what it shows is not so: each fault below fails its check."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.loopback_checks import (
    Checks,
    LostRun,
    check_checkpoints,
    check_dumps,
    check_episodes,
    check_rows,
    check_secrets,
    check_thread,
)
from benchmarks.loopback_machine import ROOT, read_task

from skyfleet.checkpoints.bucket import BucketCheckpoints
from skyfleet.checkpoints.checkpoint import FileRecord, Manifest

ROWS = [json.dumps({"step": step}) for step in range(3)]
TITLES = ["started", "step 0", "finished"]


def encode_episode(sample: int) -> bytes:
    return json.dumps({"task_key": "a", "sample": sample}).encode()


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    """A run of two steps of two episodes, with two evaluations of one, resumed at step 1."""
    run = tmp_path / "run"
    for name, count in (("train/step_000001", 2), ("train/step_000002", 2)):
        write_archive(run / f"trajectories/{name}.jsonl.gz", count)
    for step in (0, 2):
        write_archive(run / f"trajectories/eval/val/step_00000{step}.jsonl.gz", 1)
    for step in (0, 2):
        for name in ("booking", "aggregated_results"):
            path = tmp_path / f"evals/global_step_{step}/{name}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}\n")
    for step in (1, 2):
        write_checkpoint(tmp_path / f"saved/global_step_{step}", step)
    return tmp_path


def write_archive(path: Path, count: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = b"".join(encode_episode(sample) + b"\n" for sample in range(count))
    path.write_bytes(gzip.compress(lines, mtime=0))


def write_checkpoint(folder: Path, step: int) -> None:
    folder.mkdir(parents=True)
    data = f"weights of step {step}".encode()
    (folder / "model.safetensors").write_bytes(data)
    record = FileRecord(size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    files = {"model.safetensors": record}
    manifest = Manifest(step=step, files=files, skyfleet_version="0", parts=())
    (folder / "manifest.json").write_text(manifest.model_dump_json())


def read_lost(bucket: Path) -> LostRun:
    archive = bucket / "run/trajectories/train/step_000001.jsonl.gz"
    return LostRun(
        rows=ROWS[:2],
        episodes={archive.name: hashlib.sha256(archive.read_bytes()).hexdigest()},
        recorded={"step_000002.jsonl.gz": [encode_episode(0)]},
    )


def make_posts() -> list[dict[str, Any]]:
    threads = [None, "1.1", "1.1"]
    return [
        {"text": f"*{title}*\ntable", "thread_ts": thread, "channel": "runs"}
        for title, thread in zip(TITLES, threads, strict=True)
    ]


def check_all(
    bucket: Path, lost: LostRun, *, rows: list[str], posts: list[dict[str, Any]]
) -> list[str]:
    checks = Checks()
    check_rows(checks, rows, lost, 1, 2)
    saved = BucketCheckpoints(address=str(bucket / "saved"))
    check_checkpoints(checks, saved, first_step=1, last_step=2)
    run = str(bucket / "run")
    check_episodes(checks, run, lost, step=1, episodes_per_step=2, episodes_per_eval=1)
    check_dumps(checks, str(bucket / "evals"), (0, 2), ["booking"])
    check_thread(checks, posts, TITLES, "runs")
    check_secrets(checks, [str(bucket)], ["secret-token"])
    return checks.failed


def test_a_run_without_fault_passes(bucket: Path) -> None:
    assert check_all(bucket, read_lost(bucket), rows=ROWS, posts=make_posts()) == []


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "episode-twice": (
        lambda bucket: write_archive(bucket / "run/trajectories/train/step_000002.jsonl.gz", 3),
        "none twice",
    ),
    "evaluation-missing": (
        lambda bucket: (bucket / "run/trajectories/eval/val/step_000002.jsonl.gz").unlink(),
        "evaluations",
    ),
    "other-bytes": (
        lambda bucket: (bucket / "saved/global_step_1/model.safetensors").write_text("other"),
        "SHA-256",
    ),
    "step-incomplete": (
        lambda bucket: (bucket / "saved/global_step_2/manifest.json").unlink(),
        "complete checkpoints",
    ),
    "upload-not-ended": (
        lambda bucket: (bucket / "saved/owner.json").write_text("{}"),
        "owner.json",
    ),
    "dump-missing": (
        lambda bucket: (bucket / "evals/global_step_2/booking.jsonl").unlink(),
        "evaluation dumps",
    ),
    "secret-stored": (
        lambda bucket: (bucket / "run/config.yaml").write_text("token: secret-token"),
        "a key or a token",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_buckets_fails_its_check(bucket: Path, fault: str) -> None:
    lost = read_lost(bucket)
    plant, sentence = FAULTS[fault]
    plant(bucket)
    (failed,) = check_all(bucket, lost, rows=ROWS, posts=make_posts())
    assert sentence in failed


def test_lost_doubled_and_changed_rows_and_replayed_episodes_fail(bucket: Path) -> None:
    lost = read_lost(bucket)
    for rows in (ROWS[:2], [*ROWS, ROWS[2]]):
        (failed,) = check_all(bucket, lost, rows=rows, posts=make_posts())
        assert "once each" in failed
    other = replace(lost, rows=['{"step": 0, "changed": true}', ROWS[1]])
    (failed,) = check_all(bucket, other, rows=ROWS, posts=make_posts())
    assert "byte for byte" in failed
    other = replace(lost, episodes={}, recorded={"step_000002.jsonl.gz": [encode_episode(9)]})
    failures = check_all(bucket, other, rows=ROWS, posts=make_posts())
    assert [sentence.split()[-1] for sentence in failures] == ["were", "again"]


def test_messages_out_of_order_twice_or_in_another_thread_fail(bucket: Path) -> None:
    lost, posts = read_lost(bucket), make_posts()
    swapped = [posts[0], {**posts[1], "text": "*finished*"}, {**posts[2], "text": "*step 0*"}]
    for wrong in (swapped, [*posts, posts[2]]):
        (failed,) = check_all(bucket, lost, rows=ROWS, posts=wrong)
        assert "in order" in failed
    elsewhere = [posts[0], posts[1], {**posts[2], "thread_ts": "2.2"}]
    (failed,) = check_all(bucket, lost, rows=ROWS, posts=elsewhere)
    assert "one thread" in failed


def test_the_shipped_task_files_name_their_commands_and_buckets() -> None:
    for path in sorted((ROOT / "tasks").glob("*.yaml")):
        task = read_task(path)
        assert "setup.sh" in task.setup
        assert "run.sh" in task.run
        assert task.envs["S3_CHECKPOINT_BUCKET"]
        assert task.envs["FLEET_API_KEY"] == ""
