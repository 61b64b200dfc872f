"""One process at a time uploads under an address, whatever happened to the one before."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from time import monotonic, sleep

import pytest
from tests.fakes.buckets import serve_s3, use_bucket
from tests.fakes.s3_proxy import break_requests

from skyfleet.errors import CheckpointError, ConfigError
from skyfleet.storage import bucket_lock, objects
from skyfleet.storage.bucket_lock import OWNER, BucketLock
from skyfleet.storage.lock_owner import Owner, parse_owner
from skyfleet.storage.objects import delete_object, list_objects, read_object, write_object
from skyfleet.storage.versions import read_version, replace_version

_names = count()


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with serve_s3() as url:
        yield url


@pytest.fixture(params=["s3", "folder"])
def address(
    request: pytest.FixtureRequest,
    endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> str:
    monkeypatch.setattr(bucket_lock, "WAIT_SECONDS", 0.04)
    if request.param == "folder":
        return str(tmp_path / "bucket")
    return f"{use_bucket(monkeypatch, endpoint, 'locked')}/{next(_names)}"


def acquire(address: str, on_wait: Callable[[str], None] = lambda _: None) -> BucketLock:
    lock = BucketLock(address)
    asyncio.run(lock.acquire(on_wait))
    return lock


def leave_owner(address: str, heartbeat: int = 0) -> None:
    """The record of a process on another machine."""
    ours = Owner.describe_this_process()
    owner = ours.model_copy(
        update={"host": "node7", "boot_id": "b", "token": "t", "heartbeat": heartbeat}
    )
    write_object(f"{address}/{OWNER}", owner.model_dump_json().encode())


def beat(address: str) -> None:
    leave_owner(address, heartbeat=1)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = monotonic() + 120
    while not condition():
        assert monotonic() < deadline
        sleep(0.01)


def test_only_the_version_that_was_read_is_replaced(address: str) -> None:
    place = f"{address}/record"
    assert read_version(place) is None
    assert replace_version(place, b"1", None)
    assert not replace_version(place, b"2", None)
    found = read_version(place)
    assert found is not None
    assert found[0] == b"1"
    assert replace_version(place, b"3", found[1])
    if address.startswith("s3://"):
        assert not replace_version(place, b"4", found[1])
    assert read_object(place) == b"3"


def test_a_second_process_is_refused_until_the_first_has_released(address: str) -> None:
    held = acquire(address)
    with pytest.raises(ConfigError, match=r"is in use by another run \(process \d+ on .*; wait"):
        acquire(address)
    held.check()
    held.release()
    assert list_objects(address) == []
    acquire(address).release()


def test_of_processes_that_start_together_one_uploads(address: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(acquire, address) for _ in range(4)]
    failed = [future.exception() for future in futures if future.exception()]
    assert [type(error) for error in failed] == [ConfigError] * 3
    for future in futures:
        if not future.exception():
            future.result().release()


def test_a_record_whose_answer_was_lost_is_ones_own(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, answers = f"{use_bucket(monkeypatch, endpoint, 'locked')}/lost", count()
    monkeypatch.setattr(objects, "FIRST_BACKOFF_SECONDS", 0.01)

    def lose_first(method: str, path: str, headers: dict[str, str], body: bytes) -> bytes | int:
        return 503 if method == "PUT" and next(answers) == 0 else body

    with break_requests(endpoint, answer_with=lose_first) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy)
        acquire(address).release()
        assert list_objects(address) == []
    assert next(answers) > 1, "the request was repeated"


def test_a_process_elsewhere_that_still_uploads_is_not_replaced(address: str) -> None:
    leave_owner(address)
    with pytest.raises(ConfigError, match=r"in use by another run \(process \d+ on node7"):
        acquire(address, lambda _: beat(address))


def test_a_process_elsewhere_without_heartbeat_is_replaced_with_a_warning(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    leave_owner(address)
    notes: list[str] = []
    with caplog.at_level(logging.WARNING):
        lock = acquire(address, notes.append)
    (note,) = notes
    assert "was left by process" in note
    assert "is taken over from process" in caplog.text
    lock.release()


def test_a_process_elsewhere_that_ends_meanwhile_is_followed(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    leave_owner(address)
    acquire(address, lambda _: delete_object(f"{address}/{OWNER}")).release()
    assert caplog.text == ""


def test_what_is_not_a_record_is_replaced(address: str) -> None:
    write_object(f"{address}/{OWNER}", b"?")
    lock = acquire(address)
    assert b"host" in read_object(f"{address}/{OWNER}")
    lock.release()


def test_a_process_that_was_replaced_stops_and_leaves_the_other_record(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_lock, "HEARTBEAT_SECONDS", 0.01)
    lock = acquire(address)

    def has_heartbeat() -> bool:
        owner = parse_owner(read_object(f"{address}/{OWNER}"))
        return owner is not None and owner.heartbeat > 0

    def was_replaced() -> bool:
        # A folder cannot compare versions, so a heartbeat may overwrite this record once.
        leave_owner(address)
        try:
            lock.check()
        except CheckpointError:
            return True
        return False

    wait_until(has_heartbeat)
    wait_until(was_replaced)
    with pytest.raises(CheckpointError, match=r"was taken over by process \d+ on node7"):
        lock.check()
    lock.release()
    found = parse_owner(read_object(f"{address}/{OWNER}"))
    assert found is not None
    assert found.host == "node7"
