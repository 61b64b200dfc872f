"""Runs whose checkpoints, dumps and episodes are in a bucket."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest
from tests.fakes.buckets import serve_s3, use_bucket, use_credentials
from tests.fakes.s3_proxy import break_requests
from tests.fakes.small_runs import rows, small_config

from skyfleet.analysis.missing_episodes import find_missing_episodes
from skyfleet.analysis.run_folder import open_run
from skyfleet.checkpoints.bucket import BucketCheckpoints
from skyfleet.checkpoints.checkpoint import JsonPart
from skyfleet.checkpoints.resume import list_complete_checkpoints
from skyfleet.checkpoints.saving import save_checkpoint
from skyfleet.checkpoints.uploads import CheckpointUploads
from skyfleet.config.keys import dump_yaml
from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError
from skyfleet.storage import upload_queue
from skyfleet.storage.bucket_lock import BucketLock, lock_addresses
from skyfleet.storage.lock_owner import Owner
from skyfleet.storage.objects import list_objects, read_object, write_object
from skyfleet.trainer.bucket_layout import (
    check_buckets,
    drop_buckets_without_credentials,
    locate_locks,
)
from skyfleet.trainer.restoring import find_newer_in_bucket
from skyfleet.trainer.resuming import prepare_folders
from skyfleet.trainer.run import TrainerState
from skyfleet.trainer.training_run import run_training
from skyfleet.trainer.uploads import RunUploads
from skyfleet.trajectories.archive import train_path, write_groups


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with serve_s3() as url:
        yield url


def make_config(folder: Path, bucket: str, *overrides: str) -> RunConfig:
    return small_config(
        folder,
        *("trainer.run_name=first", f"trainer.ckpt_bucket={bucket}"),
        *(f"trainer.trajectory_bucket={bucket}", "trainer.ckpt_interval=1"),
        *("data.val_data={val: ['world:github?split=unseen_tasks&count=3']}", *overrides),
    )


async def test_a_run_goes_on_in_another_folder_from_what_is_in_its_bucket(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bucket = use_bucket(monkeypatch, endpoint, "resumed")
    await run_training(make_config(tmp_path / "a", bucket, "trainer.max_training_steps=2"))
    saved = BucketCheckpoints(address=f"{bucket}/skyfleet/tiny/first")
    assert saved.list_complete_steps() == [2, 1, 0]
    # An incomplete one is not found, whatever its number.
    write_object(f"{saved.step_address(7)}/policy/model.safetensors", b"half")

    longer = make_config(tmp_path / "b", bucket, "trainer.max_training_steps=3")
    assert find_newer_in_bucket(longer) == saved.step_address(2)
    progress: list[str] = []
    outcome = await run_training(longer, on_progress=progress.append)
    assert f"downloading {saved.step_address(2)}" in progress
    assert any(line.startswith("resuming first at step 2") for line in progress)
    assert [row["step"] for row in rows(tmp_path / "b")] == [0, 1, 2, 3]
    assert rows(tmp_path / "b")[:3] == rows(tmp_path / "a")
    assert outcome.comparisons, "step 0 was evaluated on the other machine"

    # The page of the second folder is that of the whole run.
    assert find_missing_episodes(open_run(tmp_path / "b")) is None
    assert {entry.step for entry in open_run(tmp_path / "b").entries()} == {0, 1, 2, 3}
    assert (tmp_path / "b" / "exports" / "dumped_evals" / "global_step_0_evals").is_dir()

    straight = make_config(tmp_path / "c", str(tmp_path / "bucket"), "trainer.max_training_steps=3")
    await run_training(straight)
    assert rows(tmp_path / "c") == rows(tmp_path / "b")
    same = BucketCheckpoints(address=f"{tmp_path}/bucket/skyfleet/tiny/first")
    one, other = (place.read_manifest(3) for place in (saved, same))
    assert one
    assert other
    assert one.files["policy/model.safetensors"] == other.files["policy/model.safetensors"]

    local = [c.step for c in list_complete_checkpoints(tmp_path / "c" / "checkpoints")]
    assert 3 in local, "the newest is never deleted"
    _check_trajectories(bucket)
    with pytest.raises(ConfigError, match=r"trainer\.seed"):
        await run_training(make_config(tmp_path / "d", bucket, "trainer.seed=1"))
    with pytest.raises(ConfigError, match="resume_mode=none, but s3://"):
        await run_training(make_config(tmp_path / "d", bucket, "trainer.resume_mode=none"))


def _check_trajectories(bucket: str) -> None:
    dumps = {info.name for info in list_objects(f"{bucket}/evals/first")}
    assert {"global_step_0/github.jsonl", "global_step_2/aggregated_results.jsonl"} <= dumps
    assert "report.html" in dumps
    results = json.loads(
        read_object(f"{bucket}/evals/first/global_step_0/aggregated_results.jsonl")
    )
    assert results["eval/all/generate/avg_num_tokens"] > 0
    assert results["eval/all/environment/avg_turns"] > 0
    names = {info.name for info in list_objects(f"{bucket}/runs/first")}
    assert {"config.yaml", "metrics.jsonl", "results.md"} <= names
    assert {f"trajectories/train/step_{step:06d}.jsonl.gz" for step in (1, 2, 3)} <= names
    assert not any("checkpoints" in name for name in names)


async def test_a_report_without_some_episodes_replaces_no_published_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bucket, run = tmp_path / "bucket", tmp_path / "run"
    config = make_config(run, str(bucket))
    run.mkdir()
    (run / "config.yaml").write_text(dump_yaml(config))
    (run / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n')
    write_groups(train_path(run / "trajectories", 2), [])
    published = f"{bucket}/evals/first/report.html"
    for text in ("partial", "partial too"):  # nothing is there yet, then a report is
        (run / "report.html").write_text(text)
        await RunUploads.from_config(config).close()
        assert read_object(published) == b"partial"
    assert "report.html stays as it is: episodes are not in" in caplog.text
    assert "training steps 1; what is computed" in caplog.text
    write_groups(train_path(run / "trajectories", 1), [])
    await RunUploads.from_config(config).close()
    assert read_object(published) == b"partial too", "it is complete now"


async def test_episodes_that_cannot_be_downloaded_are_named_in_report_and_results(
    tmp_path: Path,
) -> None:
    def config_for(folder: str, steps: int) -> RunConfig:
        settings = ("trainer.trajectory_bucket=null", f"trainer.max_training_steps={steps}")
        return make_config(tmp_path / folder, str(tmp_path / "bucket"), *settings)

    await run_training(config_for("a", 1))
    await run_training(config_for("b", 2))
    lacking = "training steps 1; val steps 0 to 1; what is computed"
    for name in ("results.md", "report.html"):
        assert lacking in (tmp_path / "b" / name).read_text(), name


@pytest.mark.parametrize("secrets", ["unset", "empty"])
def test_without_credentials_everything_stays_local_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    secrets: str,
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    if secrets == "empty":
        # A workflow does this with a secret that does not exist.
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    # Where a virtual machine would get its credentials.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    config = drop_buckets_without_credentials(make_config(tmp_path, "bucket"))
    assert (config.trainer.ckpt_bucket, config.trainer.trajectory_bucket) == (None, None)
    (record,) = caplog.records
    assert "no credentials for trainer.ckpt_bucket (s3://bucket)" in record.getMessage()
    assert RunUploads.from_config(config) == RunUploads(timeout_seconds=1800)


def test_a_bucket_that_does_not_exist_ends_the_run_before_it_starts(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_credentials(monkeypatch, endpoint)
    config = make_config(tmp_path / "run", "s3://not-there")
    sentence = (
        r"trainer\.ckpt_bucket='s3://not-there': the bucket does not exist; create it, or correct"
    )
    with pytest.raises(ConfigError, match=sentence):
        check_buckets(config)
    with pytest.raises(FileNotFoundError, match="not-there"):
        prepare_folders(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("shared", ["ckpt_bucket", "trajectory_bucket"])
async def test_a_run_name_that_another_process_uploads_is_refused(
    tmp_path: Path, shared: str
) -> None:
    """Also by a run of another model, which shares the episodes only."""
    config = small_config(tmp_path / "run", f"trainer.{shared}={tmp_path}/bucket")
    own = small_config(
        tmp_path / "run",
        f"trainer.{shared}={tmp_path}/bucket",
        f"trainer.ckpt_bucket={tmp_path}/own",
    )
    async with lock_addresses(locate_locks(config)):
        who = rf"is in use by another run \(process {os.getpid()} on .* trainer\.run_name"
        with pytest.raises(ConfigError, match=who):
            await run_training(config if shared == "ckpt_bucket" else own)
    assert not (tmp_path / "run").exists()
    assert not list_objects(str(tmp_path / "own")), "the lock of its own bucket is released"


async def test_a_run_whose_bucket_was_taken_over_uploads_nothing_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bucket = tmp_path / "bucket"
    config = make_config(tmp_path / "run", str(bucket))
    lock = BucketLock(str(bucket))
    lock._taken_by = Owner.describe_this_process()
    uploads = RunUploads.from_config(config, [lock])
    uploads.submit(save_checkpoint(tmp_path / "a", 1, {"state": JsonPart(TrainerState())}))
    uploads.publish(1)
    await uploads.close()
    assert list_objects(str(bucket)) == []
    assert "was taken over by process" in caplog.text


def test_a_path_needs_no_credentials(tmp_path: Path) -> None:
    config = make_config(tmp_path, str(tmp_path / "bucket"))
    assert drop_buckets_without_credentials(config) is config


@pytest.mark.parametrize(
    ("server", "timeout_seconds", "expected"),
    [("slow", 120, [1]), ("hanging", 0.2, [])],
)
async def test_the_end_of_a_run_waits_for_its_uploads_until_the_deadline(
    endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    server: str,
    timeout_seconds: float,
    expected: list[int],
) -> None:
    monkeypatch.setattr(upload_queue, "STOP_SECONDS", 0.1)
    released = Event()

    def answer_late(method: str, path: str, body: bytes) -> bytes | None:
        released.wait(0.02 if server == "slow" else 60)
        return body if server == "slow" else None

    address = f"{use_bucket(monkeypatch, endpoint, 'drained')}/{tmp_path.name}"
    bucket = BucketCheckpoints(address=address)
    with break_requests(endpoint, answer_late) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy)
        uploads = CheckpointUploads(bucket, tmp_path, run_folder=tmp_path, list_records=list)
        run_uploads = RunUploads(checkpoints=uploads, timeout_seconds=timeout_seconds)
        run_uploads.submit(save_checkpoint(tmp_path, 1, {"state": JsonPart(TrainerState())}))
        await run_uploads.close()
        released.set()
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    assert bucket.list_complete_steps() == expected
    assert ("not uploaded: checkpoint 1;" in caplog.text) == (not expected)


@pytest.mark.exhaustive
def test_sigterm_saves_a_checkpoint_and_uploads_it(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bucket = use_bucket(monkeypatch, endpoint, "terminated")
    config = make_config(tmp_path / "a", bucket, "trainer.max_training_steps=1000")
    (tmp_path / "run.yaml").write_text(dump_yaml(config))
    command = [sys.executable, "-m", "skyfleet.cli.main", "train", str(tmp_path / "run.yaml")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        saved = BucketCheckpoints(address=f"{bucket}/skyfleet/tiny/first")
        while saved.list_complete_steps()[:1] < [2]:
            assert process.poll() is None
            time.sleep(0.1)
        process.terminate()
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
    newest = max(list_complete_checkpoints(tmp_path / "a" / "checkpoints"), key=lambda c: c.step)
    assert saved.list_complete_steps()[0] == newest.step
    assert saved.read_manifest(newest.step) == newest.manifest
