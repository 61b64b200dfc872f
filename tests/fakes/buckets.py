"""An S3 server on loopback (moto), and its buckets as this process's environment names them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from moto.server import ThreadedMotoServer


@contextmanager
def serve_s3() -> Iterator[str]:
    """Yields the endpoint."""
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


def use_bucket(monkeypatch: pytest.MonkeyPatch, endpoint: str, name: str) -> str:
    """Create an empty bucket; the environment gets its server and credentials."""
    use_credentials(monkeypatch, endpoint)
    # moto imports its parts with the first request, which takes seconds on a busy machine.
    created = httpx.put(f"{endpoint}/{name}", timeout=120)
    assert created.status_code in (200, 409), created.text
    return f"s3://{name}"


def use_credentials(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(variable, "testing")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
