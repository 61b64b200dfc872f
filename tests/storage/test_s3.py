"""S3 through boto3, against moto's server on localhost."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import boto3
import pytest
from moto.server import ThreadedMotoServer

from skyfleet.cli.tasks_prepare import prepare_command
from skyfleet.curation.quarantine import check_training_data
from skyfleet.errors import ConfigError, MissingExtraError
from skyfleet.storage import s3
from skyfleet.storage.store import read_bytes, sibling_address, write_bytes
from skyfleet.tasks.loading import load_tasks
from skyfleet.tasks.manifest import read_manifest


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    s3._client.cache_clear()
    yield monkeypatch
    s3._client.cache_clear()


@pytest.fixture
def bucket(endpoint: str, account: pytest.MonkeyPatch) -> str:
    account.setenv("AWS_ENDPOINT_URL", endpoint)
    boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="tasks")
    return "s3://tasks"


def test_written_data_is_read_back(bucket: str) -> None:
    data = bytes(range(256)) * 4096
    write_bytes(f"{bucket}/deep/a.bin", data)
    assert read_bytes(f"{bucket}/deep/a.bin") == data
    write_bytes(f"{bucket}/deep/a.bin", b"")
    assert read_bytes(f"{bucket}/deep/a.bin") == b""


@pytest.mark.parametrize("address", ["s3://tasks/none.json", "s3://nobody/none.json"])
def test_a_missing_object_is_a_file_not_found_error_with_its_address(
    bucket: str, address: str
) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        read_bytes(address)
    assert caught.value.filename == address


def test_tasks_are_read_from_an_address(bucket: str) -> None:
    row = b'{"key": "k", "env_id": "github", "prompt": "p"}\n'
    write_bytes(f"{bucket}/v1/all.jsonl", row)
    (task,) = load_tasks(f"{bucket}/v1/all.jsonl")
    assert (task.key, task.env_key) == ("k", "github")


def test_a_dataset_is_prepared_from_one_address_to_another(bucket: str) -> None:
    rows = [{"key": f"k{i}", "env_id": "github", "prompt": f"do {i}"} for i in range(40)]
    write_bytes(f"{bucket}/raw.json", json.dumps(rows).encode())
    prepare_command(tasks_json=f"{bucket}/raw.json", output_dir=f"{bucket}/v1/", eval_ratio=0.5)
    train = f"{bucket}/v1/train.parquet"
    check_training_data(load_tasks(train), [train], allow_unmanifested=False, quarantine=None)
    assert read_manifest(f"{bucket}/v1/manifest.json").thresholds == {"github": 0.5}


def test_a_failing_service_is_retried(account: pytest.MonkeyPatch) -> None:
    busy = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    with respond_with(account, busy, COMPLETE):
        assert read_bytes("s3://tasks/a") == b"data"


def test_an_interrupted_body_is_read_again(account: pytest.MonkeyPatch) -> None:
    account.setattr(s3, "FIRST_BACKOFF_SECONDS", 0.01)
    with respond_with(account, COMPLETE[:-2], COMPLETE[:-3], COMPLETE):
        assert read_bytes("s3://tasks/a") == b"data"


def test_a_body_that_is_always_interrupted_is_an_error_with_its_address(
    account: pytest.MonkeyPatch,
) -> None:
    account.setattr(s3, "FIRST_BACKOFF_SECONDS", 0.01)
    account.setattr(s3, "MAX_ATTEMPTS", 2)
    with (
        respond_with(account, COMPLETE[:-2], COMPLETE[:-2]),
        pytest.raises(OSError, match="2") as caught,
    ):
        read_bytes("s3://tasks/a")
    assert caught.value.filename == "s3://tasks/a"


COMPLETE = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: close\r\n\r\ndata"


@contextmanager
def respond_with(account: pytest.MonkeyPatch, *responses: bytes) -> Iterator[None]:
    """Serve these responses, one per connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for response in responses:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(response)

    thread = Thread(target=serve)
    thread.start()
    account.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
    yield
    thread.join(timeout=5)
    listener.close()
    assert not thread.is_alive()


def test_an_unreachable_service_is_an_error_with_its_address(account: pytest.MonkeyPatch) -> None:
    account.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    account.setattr(s3, "MAX_ATTEMPTS", 1)
    with pytest.raises(OSError, match="Could not connect") as caught:
        read_bytes("s3://tasks/a")
    assert caught.value.filename == "s3://tasks/a"


@pytest.mark.parametrize("address", ["s3://", "s3://bucket", "s3://bucket/", "s3:///key"])
def test_an_address_without_bucket_or_key_is_rejected(address: str) -> None:
    with pytest.raises(ConfigError, match="is not the address of an object; write s3://bucket/key"):
        read_bytes(address)


def test_without_boto3_the_extra_is_named(account: pytest.MonkeyPatch) -> None:
    account.setitem(sys.modules, "boto3", None)
    with pytest.raises(MissingExtraError, match=r"\.\[s3\]"):
        read_bytes("s3://tasks/a")


def test_files_are_read_and_written_by_the_same_functions(tmp_path: Path) -> None:
    write_bytes(tmp_path / "deep" / "a", b"1")
    assert read_bytes(str(tmp_path / "deep" / "a")) == b"1"
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "none")


def test_a_sibling_address_is_built_for_paths_and_urls() -> None:
    assert sibling_address("s3://b/v1/train.parquet", "manifest.json") == "s3://b/v1/manifest.json"
    assert sibling_address(Path("data/train.parquet"), "manifest.json") == "data/manifest.json"
    assert sibling_address("train.parquet", "manifest.json") == "manifest.json"
