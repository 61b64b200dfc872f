"""az:// against Azurite, Microsoft's emulator: `npm install azurite`, with its .bin on PATH."""

from __future__ import annotations

import base64
import hashlib
import hmac
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path

import httpx
import pytest

from skyfleet.storage.objects import (
    delete_object,
    list_folders,
    list_objects,
    read_object,
    write_object,
)
from skyfleet.storage.transfer import hash_object, upload_file
from skyfleet.storage.versions import read_version, replace_version

pytestmark = pytest.mark.exhaustive

# The emulator's own account, the same everywhere; obstore expects it at this port.
ACCOUNT, PORT = "devstoreaccount1", 10000
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    command = shutil.which("azurite-blob")
    if command is None:
        pytest.skip("azurite-blob is not installed: npm install azurite")
    monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
    options = ("--silent", "--skipApiVersionCheck", "--disableTelemetry")
    place = ("--location", str(tmp_path / "azurite"), "--blobPort", str(PORT))
    with subprocess.Popen([command, *options, *place], stdout=subprocess.DEVNULL) as process:
        try:
            _create_container("box")
            yield "az://box"
        finally:
            process.kill()


def _create_container(name: str) -> None:
    """Signed by hand, because obstore creates no containers."""
    now = formatdate(usegmt=True)
    headers = {"x-ms-date": now, "x-ms-version": "2021-08-06"}
    signed = "".join(f"{key}:{value}\n" for key, value in headers.items())
    text = "PUT" + "\n" * 12 + signed + f"/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    digest = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    for _ in range(100):
        try:
            created = httpx.put(
                f"http://127.0.0.1:{PORT}/{ACCOUNT}/{name}?restype=container", headers=headers
            )
        except httpx.TransportError:
            time.sleep(0.1)
            continue
        assert created.status_code == 201, created.text
        return
    raise AssertionError("Azurite does not answer")


def test_objects_in_azure_are_written_listed_read_and_deleted(
    container: str, tmp_path: Path
) -> None:
    write_object(f"{container}/a/small", b"1")
    path = tmp_path / "large"
    path.write_bytes(random.Random(0).randbytes(40_000_000))
    sent = upload_file(path, f"{container}/b/large")
    assert hash_object(f"{container}/b/large") == sent
    assert list_folders(container) == ["a", "b"]
    assert [info.size_bytes for info in list_objects(container)] == [1, 40_000_000]
    found = read_version(f"{container}/a/small")
    assert found is not None
    assert not replace_version(f"{container}/a/small", b"2", None)
    assert replace_version(f"{container}/a/small", b"3", found[1])
    assert not replace_version(f"{container}/a/small", b"4", found[1])
    for _ in range(2):
        delete_object(f"{container}/a/small")
    with pytest.raises(FileNotFoundError):
        read_object(f"{container}/a/small")
