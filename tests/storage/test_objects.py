"""Objects through obstore, against moto's S3 server on loopback and in folders."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import socket
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from threading import Thread

import httpx
import pytest
from tests.fakes.buckets import serve_s3, use_bucket, use_credentials
from tests.fakes.s3_proxy import break_requests

from skyfleet.checkpoints.bucket import BucketCheckpoints
from skyfleet.cli.main import main
from skyfleet.cli.tasks_prepare import prepare_command
from skyfleet.curation.quarantine import check_training_data
from skyfleet.errors import ConfigError, MissingExtraError
from skyfleet.storage import objects, transfer
from skyfleet.storage.credentials import names_credentials, read_aws_profile
from skyfleet.storage.objects import (
    delete_object,
    list_folders,
    list_objects,
    read_object,
    write_object,
)
from skyfleet.storage.store import read_bucket, read_bytes, sibling_address, write_bytes
from skyfleet.storage.transfer import (
    choose_part_bytes,
    download_file,
    hash_object,
    upload_file,
)
from skyfleet.tasks.loading import load_tasks
from skyfleet.tasks.manifest import read_manifest


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with serve_s3() as url:
        yield url


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    use_credentials(monkeypatch, "http://127.0.0.1:1")
    monkeypatch.setattr(objects, "FIRST_BACKOFF_SECONDS", 0.01)
    return monkeypatch


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    return use_bucket(monkeypatch, endpoint, "tasks")


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


def test_a_server_that_rejects_this_machines_clock_is_quoted(account: pytest.MonkeyPatch) -> None:
    body = b"<Error><Code>RequestTimeTooSkewed</Code></Error>"
    head = b"HTTP/1.1 403 Forbidden\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    with (
        respond_with(account, head + body),
        pytest.raises(PermissionError, match="RequestTimeTooSkewed"),
    ):
        read_bytes("s3://tasks/a")


@pytest.mark.parametrize(
    ("status", "code", "number"),
    [
        *((403, code, errno.EACCES) for code in ("AccessDenied", "SignatureDoesNotMatch", "")),
        (400, "ExpiredToken", errno.EACCES),
        (301, "PermanentRedirect", errno.EACCES),
        (404, "NoSuchBucket", errno.ENOENT),
        (503, "SlowDown", errno.EIO),
        (400, "RequestTimeout", errno.EIO),
    ],
)
def test_an_answer_of_s3_is_a_refusal_an_absence_or_an_outage(
    account: pytest.MonkeyPatch, status: int, code: str, number: int
) -> None:
    account.setattr(objects, "MAX_ATTEMPTS", 1)
    for ask in (read_object, list_folders, list_objects):
        with refuse(account, status, code), pytest.raises(OSError, match=r"\w") as caught:
            ask("s3://tasks/a.json")
        assert caught.value.errno == number
        assert "<Error>" not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "code", "exit_code"),
    [(400, "ExpiredToken", 2), (404, "NoSuchBucket", 2), (503, "SlowDown", 75)],
)
def test_a_refusal_exits_with_2_and_an_outage_with_75(
    account: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: int,
    code: str,
    exit_code: int,
) -> None:
    account.setattr(objects, "MAX_ATTEMPTS", 1)
    account.setattr(sys, "argv", ["skyfleet", "tasks", "stats", "s3://tasks/a.json"])
    with refuse(account, status, code), pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == exit_code
    assert capsys.readouterr().err.startswith("skyfleet: s3://tasks/a.json: ")


def refuse(account: pytest.MonkeyPatch, status: int, code: str) -> AbstractContextManager[None]:
    body = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode() if code else b""
    head = f"HTTP/1.1 {status} No\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    return respond_with(account, head.encode() + body)


def test_one_key_without_the_other_is_a_mistake(account: pytest.MonkeyPatch) -> None:
    account.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(ConfigError, match="AWS_SECRET_ACCESS_KEY is set and AWS_ACCESS_KEY_ID is"):
        read_bytes("s3://tasks/a")
    with pytest.raises(ConfigError, match=r"'s4://foo', whose scheme is unknown; use s3://"):
        read_bucket("s4://foo")


def test_an_interrupted_body_is_read_again(account: pytest.MonkeyPatch) -> None:
    with respond_with(account, COMPLETE[:-2], COMPLETE[:-3], COMPLETE):
        assert read_bytes("s3://tasks/a") == b"data"


def test_a_body_that_is_always_interrupted_is_an_error_with_its_address(
    account: pytest.MonkeyPatch,
) -> None:
    account.setattr(objects, "MAX_ATTEMPTS", 2)
    with (
        respond_with(account, COMPLETE[:-2], COMPLETE[:-2]),
        pytest.raises(OSError, match=r"body|closed|error") as caught,
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
    thread.join(timeout=120)
    listener.close()
    assert not thread.is_alive()


def test_an_unreachable_service_is_an_error_with_its_address(account: pytest.MonkeyPatch) -> None:
    account.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    account.setattr(objects, "MAX_ATTEMPTS", 1)
    with pytest.raises(OSError, match=r"Connection refused|error sending request") as caught:
        read_bytes("s3://tasks/a")
    assert caught.value.filename == "s3://tasks/a"


@pytest.mark.parametrize("address", ["s3://", "s3://bucket", "gs://bucket/", "az:///key"])
def test_an_address_without_bucket_or_key_is_rejected(address: str) -> None:
    with pytest.raises(
        ConfigError, match=r"is not the address of an object; write \w\w://bucket/key"
    ):
        read_bytes(address)


def test_without_obstore_the_extra_is_named(account: pytest.MonkeyPatch) -> None:
    account.setitem(sys.modules, "obstore", None)
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


def test_objects_are_listed_and_deleted(bucket: str, tmp_path: Path) -> None:
    for place in (f"{bucket}/listed", str(tmp_path)):
        for name in ("b/two", "a/one", "top"):
            write_object(f"{place}/{name}", name.encode())
        assert [(i.name, i.size_bytes) for i in list_objects(place)] == [
            ("a/one", 5),
            ("b/two", 5),
            ("top", 3),
        ]
        assert list_folders(place) == ["a", "b"]
        for _ in range(2):
            delete_object(f"{place}/top")
        assert [info.name for info in list_objects(place)] == ["a/one", "b/two"]
        assert list_objects(f"{place}/none") == []


@pytest.mark.parametrize("checksum", [False, True])
def test_a_large_file_is_sent_in_parts_and_its_hash_is_that_of_the_object(
    bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checksum: bool
) -> None:
    # S3 accepts no smaller parts.
    monkeypatch.setattr(transfer, "_PART_BYTES", 5 * 1024 * 1024)
    monkeypatch.setattr(transfer, "_READ_BYTES", 1024 * 1024)
    path, copy = tmp_path / "large", tmp_path / "copy"
    path.write_bytes(random.Random(0).randbytes(11 * 1024 * 1024))
    sent = upload_file(path, f"{bucket}/large", checksum=checksum)
    assert sent == hash_object(f"{bucket}/large") == download_file(f"{bucket}/large", copy)
    assert copy.read_bytes() == path.read_bytes()
    assert sent.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_gs_addresses_use_googles_xml_api(
    endpoint: str, bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """moto, because gcp-storage-emulator has the JSON API only; it knows no generations."""
    monkeypatch.setattr(transfer, "_PART_BYTES", 5 * 1024 * 1024)
    path = tmp_path / "large"
    path.write_bytes(random.Random(0).randbytes(6 * 1024 * 1024))
    with break_requests(endpoint) as proxy:
        key = {"gcs_base_url": proxy, "disable_oauth": True}
        key |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(key))
        place = "gs://tasks/google"
        write_object(f"{place}/a/small", b"1")
        assert read_object(f"{place}/a/small") == b"1"
        assert upload_file(path, f"{place}/large") == hash_object(f"{place}/large")
        assert [info.name for info in list_objects(place)] == ["a/small", "large"]
        assert list_folders(place) == ["a"]
        delete_object(f"{place}/large")
        with pytest.raises(FileNotFoundError):
            read_object(f"{place}/large")


def test_a_stopped_upload_leaves_the_old_object(bucket: str, tmp_path: Path) -> None:
    calls = iter([None, None])
    path = tmp_path / "large"
    path.write_bytes(bytes(20 * 1024 * 1024))
    write_object(f"{bucket}/stopped", b"old")
    with pytest.raises(StopIteration):
        upload_file(path, f"{bucket}/stopped", check=lambda: next(calls))
    assert read_object(f"{bucket}/stopped") == b"old"


def test_s3_takes_at_most_ten_thousand_parts() -> None:
    assert choose_part_bytes(1) == choose_part_bytes(10**11) == 16 * 1024 * 1024
    assert 10**12 / choose_part_bytes(10**12) <= 10_000


def test_a_variable_that_is_set_to_nothing_counts_as_missing(account: pytest.MonkeyPatch) -> None:
    """As in a task file; obstore takes an empty endpoint for an address."""
    account.setattr(objects, "MAX_ATTEMPTS", 1)
    account.setenv("HTTPS_PROXY", "http://127.0.0.1:1")  # asks nobody
    for name in ("AWS_ENDPOINT_URL", "AWS_SESSION_TOKEN"):
        account.setenv(name, "")
    with pytest.raises(OSError, match=r"https://s3\.us-east-1\.amazonaws\.com/tasks/a"):
        read_bytes("s3://tasks/a")
    assert os.environ["AWS_ENDPOINT_URL"] == ""


@pytest.mark.parametrize(
    ("endpoint_url", "sentence"),
    [
        ("localhost:9000", r"AWS_ENDPOINT_URL='localhost:9000' is not a URL; write it with"),
        ("http://a b", r"obstore failed: .*InvalidUri"),
    ],
)
def test_an_endpoint_that_is_not_a_url_is_one_sentence(
    account: pytest.MonkeyPatch, endpoint_url: str, sentence: str
) -> None:
    account.setenv("AWS_ENDPOINT_URL", endpoint_url)
    with pytest.raises((ConfigError, OSError), match=sentence):
        read_bytes("s3://tasks/a")


def test_keys_are_read_from_awss_shared_files(
    endpoint: str, bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_object(f"{bucket}/shared", b"1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_PROFILE", "team")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    (tmp_path / "config").write_text("[profile team]\nregion = eu-west-1\n")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert not names_credentials("s3"), "a profile with a region only"
    (tmp_path / "credentials").write_text(
        "[team]\naws_access_key_id = a%b\naws_secret_access_key = c\n"
    )
    assert names_credentials("s3")
    assert read_aws_profile()["config"]["region"] == "eu-west-1"
    assert read_object(f"{bucket}/shared") == b"1"


def test_the_folder_markers_of_a_console_are_no_objects(
    bucket: str, endpoint: str, tmp_path: Path
) -> None:
    for key in ("marked/", "marked/run/", "marked/run/reports/"):
        httpx.put(f"{endpoint}/tasks/{key}", content=b"").raise_for_status()
    write_object(f"{bucket}/marked/run/config.yaml", b"a: 1")
    write_object(f"{bucket}/marked/run/reports/val.json", b"")
    assert [info.name for info in list_objects(f"{bucket}/marked/run")] == [
        "config.yaml",
        "reports/val.json",  # empty, and no folder of others
    ]
    BucketCheckpoints(address=f"{bucket}/marked").download_records(tmp_path)
    assert (tmp_path / "reports" / "val.json").is_file()
    httpx.put(f"{endpoint}/tasks/twice//slashed.json", content=b"x").raise_for_status()
    with pytest.raises(OSError, match=r'the key "twice//slashed\.json" has an empty part; rename'):
        list_objects(f"{bucket}/twice")
