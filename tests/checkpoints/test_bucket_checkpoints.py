"""Checkpoints in a bucket: what is complete is intact, whenever an upload or a server ends."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from tests.fakes.buckets import serve_s3, use_bucket
from tests.fakes.s3_proxy import break_requests

from skyfleet.checkpoints.bucket import BucketCheckpoints, UploadCheck
from skyfleet.checkpoints.checkpoint import MANIFEST, Checkpoint, Manifest
from skyfleet.checkpoints.resume import list_complete_checkpoints, verify_checkpoint
from skyfleet.checkpoints.saving import save_checkpoint
from skyfleet.checkpoints.uploads import CheckpointUploads
from skyfleet.errors import CheckpointError
from skyfleet.storage import objects, upload_queue
from skyfleet.storage.objects import list_objects, read_object, write_object
from skyfleet.storage.upload_queue import Check, UploadQueue


class Part:
    """Some files with random bytes."""

    def __init__(self, seed: int, *sizes: int) -> None:
        self._random, self._sizes = random.Random(seed), sizes

    def save(self, folder: Path) -> None:
        for number, size in enumerate(self._sizes):
            (folder / f"{number}.bin").write_bytes(self._random.randbytes(size))

    def load(self, folder: Path) -> None: ...


def save(root: Path, step: int, *, seed: int | None = None) -> Checkpoint:
    return save_checkpoint(root, step, {"policy": Part(step if seed is None else seed, 3000, 0, 7)})


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with serve_s3() as url:
        yield url


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> BucketCheckpoints:
    return BucketCheckpoints(
        address=f"{use_bucket(monkeypatch, endpoint, 'saved')}/{tmp_path.name}"
    )


class KilledError(Exception):
    """Stands for the end of the process."""


@pytest.mark.parametrize("again", [False, True])
def test_an_upload_that_ends_anywhere_leaves_the_checkpoint_before_it(
    tmp_path: Path, again: bool
) -> None:
    """`again`: the bucket has the same step with other content, as after an interrupted step."""
    bucket = BucketCheckpoints(address=str(tmp_path / "bucket"))
    bucket.upload(save(tmp_path / "a", 1))
    if again:
        bucket.upload(save(tmp_path / "other", 2, seed=77))
    new = save(tmp_path / "a", 2)
    for stop_at in count(1):
        calls = count(1)

        def check(calls: Iterator[int] = calls, stop_at: int = stop_at) -> None:
            if next(calls) == stop_at:
                raise KilledError

        try:
            bucket.upload(new, check=check)
            break
        except KilledError:
            assert bucket.list_complete_steps() == [1]
            newest = bucket.download(1, tmp_path / "fresh")
            verify_checkpoint(newest)
    assert stop_at > 8, "the loop stopped at every point"
    assert bucket.list_complete_steps() == [2, 1]
    found = verify_checkpoint(bucket.download(2, tmp_path / "fresh"))
    assert found.manifest == new.manifest
    names = {info.name for info in list_objects(bucket.step_address(2))}
    assert names == {MANIFEST, *new.manifest.files}


def change_stored(method: str, path: str, body: bytes) -> bytes:
    return b"?" + body[1:] if method == "PUT" and path.endswith("0.bin") else body


def cut_stored(method: str, path: str, body: bytes) -> bytes:
    return body[:100] if method == "PUT" and path.endswith("0.bin") else body


def change_read(method: str, path: str, headers: dict[str, str], body: bytes) -> bytes:
    return b"?" + body[1:] if method == "GET" and path.endswith("0.bin") else body


@pytest.mark.parametrize(
    ("faults", "upload_check"),
    [
        ({"fault": change_stored}, "read_back"),
        ({"answer_with": change_read}, "read_back"),
        ({"fault": cut_stored}, "read_back"),
        ({"fault": cut_stored}, "checksum"),
    ],
)
def test_a_server_that_stores_or_returns_other_bytes_has_no_complete_checkpoint(
    bucket: BucketCheckpoints,
    endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    faults: dict[str, Any],
    upload_check: UploadCheck,
) -> None:
    """Its answers say 200, and have the ETag of what it stored."""
    checked = BucketCheckpoints(address=bucket.address, upload_check=upload_check)
    with break_requests(endpoint, **faults) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy)
        with pytest.raises(CheckpointError, match=r"0\.bin (is not what was sent|has 100 bytes)"):
            checked.upload(save(tmp_path, 1))
        assert checked.list_complete_steps() == []


@pytest.mark.parametrize("date", ["Thu, 01 Jan 1970 00:00:00 GMT", "Fri, 01 Jan 2100 00:00:00 GMT"])
def test_the_newest_is_the_one_with_the_highest_number_whatever_clocks_say(
    bucket: BucketCheckpoints,
    endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    date: str,
) -> None:
    def skew_clock(method: str, path: str, headers: dict[str, str], body: bytes) -> bytes:
        headers |= {name: date for name in ("date", "last-modified") if name in headers}
        return body

    with break_requests(endpoint, answer_with=skew_clock) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy)
        for step in (10, 9):
            bucket.upload(save(tmp_path / "a", step))
        assert bucket.find_newest() == 10
        verify_checkpoint(bucket.download(10, tmp_path / "b"))


@pytest.mark.parametrize("upload_check", ["read_back", "checksum"])
def test_failing_and_vanishing_servers_are_retried(
    bucket: BucketCheckpoints,
    endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    upload_check: UploadCheck,
) -> None:
    monkeypatch.setattr(objects, "FIRST_BACKOFF_SECONDS", 0.01)
    requests = count()

    def fail_often(method: str, path: str, body: bytes) -> bytes | int | None:
        return {1: 503, 2: None}.get(next(requests) % 4, body)

    checked = BucketCheckpoints(address=bucket.address, upload_check=upload_check)
    with break_requests(endpoint, fail_often) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy)
        checked.upload(save(tmp_path / "a", 1))
        verify_checkpoint(checked.download(1, tmp_path / "b"))


@pytest.mark.parametrize("damage", ["changed", "missing", "shorter"])
def test_a_damaged_object_is_found_by_the_download(tmp_path: Path, damage: str) -> None:
    bucket = BucketCheckpoints(address=str(tmp_path / "bucket"))
    bucket.upload(save(tmp_path / "a", 1))
    path = tmp_path / "bucket" / "global_step_1" / "policy" / "0.bin"
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(b"?" * (3000 if damage == "changed" else 10))
    with pytest.raises(CheckpointError, match=r"0\.bin (is missing|has changed)"):
        bucket.download(1, tmp_path / "b")
    assert list_complete_checkpoints(tmp_path / "b") == []


def test_names_in_a_manifest_do_not_leave_the_folder(tmp_path: Path) -> None:
    bucket = BucketCheckpoints(address=str(tmp_path / "bucket"))
    saved = save(tmp_path / "a", 1)
    record = saved.manifest.files["policy/0.bin"]
    hostile = Manifest(step=1, skyfleet_version="1", parts=(), files={"../../outside.bin": record})
    write_object(f"{bucket.step_address(1)}/{MANIFEST}", hostile.model_dump_json().encode())
    with pytest.raises(CheckpointError, match="is not the name of a file"):
        bucket.download(1, tmp_path / "b")


def make_uploads(bucket: BucketCheckpoints, root: Path) -> CheckpointUploads:
    return CheckpointUploads(bucket, root, run_folder=root, list_records=list)


def wait(uploads: CheckpointUploads) -> None:
    assert uploads.queue.wait(120)


def test_local_copies_are_deleted_only_after_their_upload_and_never_the_newest(
    bucket: BucketCheckpoints, endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(upload_queue, "FIRST_RETRY_SECONDS", 0.05)
    is_down = True

    def fail(method: str, path: str, body: bytes) -> bytes | int:
        return 400 if is_down else body

    def steps() -> list[int]:
        return sorted(c.step for c in list_complete_checkpoints(tmp_path))

    with break_requests(endpoint, fail) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy)
        uploads = make_uploads(bucket, tmp_path)
        for step in (0, 1, 2, 3):
            uploads.submit(save(tmp_path, step))
            uploads.remove_uploaded(protect=(0,))
        assert steps() == sorted(uploads.pending_steps) == [0, 1, 2, 3]
        is_down = False
        wait(uploads)
        uploads.remove_uploaded(protect=(0,))
        assert steps() == [0, 3]
        assert bucket.list_complete_steps() == [3, 2, 1, 0]
        assert uploads.queue.stop() == []


def test_what_a_killed_process_did_not_upload_is_uploaded_by_the_next(
    bucket: BucketCheckpoints, tmp_path: Path
) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    uploads = make_uploads(bucket, tmp_path)
    uploads.start()
    wait(uploads)
    uploads.queue.stop()
    assert bucket.list_complete_steps() == [2, 1]


def test_a_damaged_local_checkpoint_is_given_up_and_the_others_are_uploaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bucket = BucketCheckpoints(address=str(tmp_path / "bucket"))
    for step in (1, 2):
        save(tmp_path / "a", step)
    (tmp_path / "a" / "global_step_2" / "policy" / "0.bin").write_bytes(b"?" * 3000)
    uploads = make_uploads(bucket, tmp_path / "a")
    uploads.start()
    wait(uploads)
    uploads.queue.stop()
    assert bucket.list_complete_steps() == [1]
    assert "checkpoint 2 is not uploaded" in caplog.text
    uploads.remove_uploaded()
    assert sorted(c.step for c in list_complete_checkpoints(tmp_path / "a")) == [2]


def test_a_stopped_queue_names_what_it_did_not_upload(
    bucket: BucketCheckpoints, endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with break_requests(endpoint, lambda *_: 400) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy)
        uploads = make_uploads(bucket, tmp_path)
        uploads.submit(save(tmp_path, 5))
        assert uploads.queue.stop() == [5]


def test_a_checkpoint_is_complete_after_what_it_follows(tmp_path: Path) -> None:
    bucket, episodes = BucketCheckpoints(address=str(tmp_path / "bucket")), UploadQueue("episodes")
    released, seen = Event(), list[list[int]]()

    def upload_episodes(check: Check) -> None:
        assert released.wait(120)
        seen.append(bucket.list_complete_steps())

    episodes.put("step 1", upload_episodes)
    uploads = CheckpointUploads(
        bucket, tmp_path / "a", run_folder=tmp_path, list_records=list, follows=episodes
    )
    uploads.submit(save(tmp_path / "a", 1))
    while not list_objects(bucket.step_address(1)):
        assert not uploads.queue.wait(0.01)
    released.set()
    wait(uploads)
    assert seen == [[]]
    assert bucket.list_complete_steps() == [1]
    for queue in (uploads.queue, episodes):
        queue.stop()


def test_records_are_uploaded_before_the_manifest(tmp_path: Path) -> None:
    bucket = BucketCheckpoints(address=str(tmp_path / "bucket"))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st')
    uploads = CheckpointUploads(
        bucket, tmp_path / "a", run_folder=tmp_path, list_records=lambda: ["metrics.jsonl"]
    )
    uploads.submit(save(tmp_path / "a", 1))
    wait(uploads)
    uploads.queue.stop()
    assert read_object(f"{bucket.address}/run/metrics.jsonl") == b'{"step": 1}\n'


def test_a_bucket_that_allows_no_deletions_gets_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(address: str) -> None:
        raise PermissionError(address)

    monkeypatch.setattr("skyfleet.checkpoints.bucket.delete_object", refuse)
    bucket = BucketCheckpoints(address=str(tmp_path / "bucket"))
    write_object(f"{bucket.step_address(1)}/left.bin", b"of an upload that was killed")
    bucket.upload(save(tmp_path, 1))
    bucket.upload(save(tmp_path, 1))
    assert bucket.list_complete_steps() == [1]
    with pytest.raises(PermissionError, match="manifest"):
        bucket.upload(save(tmp_path, 1, seed=2))


def test_uploads_that_keep_failing_are_reported_once_per_outage(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(upload_queue, "FIRST_RETRY_SECONDS", 0.0)
    reports: list[tuple[str, str]] = []
    queue = UploadQueue("checkpoint")
    queue.on_failing = lambda name, reason: reports.append((name, reason))

    def fail_often(attempts: Iterator[int]) -> Callable[[Check], None]:
        def work(check: Check) -> None:
            if next(attempts) <= upload_queue.FAILURES_BEFORE_REPORT + 3:
                raise PermissionError("AccessDenied")

        return work

    for step in (1, 2):
        queue.put(step, fail_often(count(1)))
        assert queue.wait(60)
    assert reports == [(f"checkpoint {n}", "PermissionError: AccessDenied") for n in (1, 2)]
    assert "trying again" in caplog.text
    queue.stop()
