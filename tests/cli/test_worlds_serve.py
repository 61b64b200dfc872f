"""`skyfleet worlds serve` serves, on this machine only, until it is told to stop."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest

SOURCE = "world:github?split=train&count=2"


@pytest.mark.parametrize(
    ("protocol", "path", "status"),
    [("openenv", "/health", 200), ("mcp", "/some_task/mcp", 405), ("fleet", "/v1/account", 200)],
)
def test_a_server_answers_and_ends_on_an_interrupt(protocol: str, path: str, status: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["worlds", "serve", SOURCE, "--protocol", protocol, "--port", str(port)]
    server = subprocess.Popen(
        [sys.executable, "-m", "skyfleet.cli.main", *words],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"FLEET_API_KEY": "local"},
    )
    try:
        assert server.stdout is not None
        assert (
            f"serving 2 tasks at http://127.0.0.1:{port} by {protocol}" in server.stdout.readline()
        )
        headers = {"Authorization": "Bearer local"}
        assert _answer(f"http://127.0.0.1:{port}{path}", headers).status_code == status
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=20)


def _answer(url: str, headers: dict[str, str]) -> httpx.Response:
    for _ in range(100):
        try:
            return httpx.get(url, headers=headers)
        except httpx.ConnectError:
            time.sleep(0.1)
    raise AssertionError(f"{url} never answered")
