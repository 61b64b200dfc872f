"""The servers of `benchmarks.loopback`: S3 with the dataset, a Fleet-compatible one, a fake of Slack."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
from benchmarks.loopback_machine import wait_until
from benchmarks.loopback_transcript import run_skyfleet
from tests.fakes.alert_server import AlertServer, serve_alerts
from tests.fakes.rclone_server import find_free_port

from skyfleet.storage.objects import write_object

ENVS = ("booking", "reddit")
WORLDS = [f"world:{name}?split=all&count=150&max_difficulty=1" for name in ENVS]
KEYS = {
    "AWS_ACCESS_KEY_ID": "AKIALOOPBACK",
    "AWS_SECRET_ACCESS_KEY": "loopback-aws-secret",
    "FLEET_API_KEY": "loopback-fleet-key",
    "SLACK_BOT_TOKEN": "xoxb-loopback-token",
}


def start_servers(
    folder: Path, envs: Mapping[str, str], stack: ExitStack
) -> tuple[bytes, AlertServer]:
    """Start the three; the dataset is in its bucket, and this process's environment names them."""
    s3, fleet = (f"http://127.0.0.1:{find_free_port()}" for _ in range(2))
    os.environ |= {**KEYS, "AWS_ENDPOINT_URL": s3, "AWS_REGION": envs["AWS_REGION"]}
    os.environ["FLEET_BASE_URL"] = fleet
    words = ["moto.server", "-H", "127.0.0.1", "-p", s3.rpartition(":")[2]]
    stack.enter_context(serve(words, folder / "s3.log"))
    wait_until(lambda: is_up(s3), "the S3 server answers")
    for name in ("S3_DATASET_BUCKET", "S3_CHECKPOINT_BUCKET", "S3_TRAJECTORY_BUCKET"):
        httpx.put(f"{s3}/{envs[name]}", timeout=120).raise_for_status()
    print(f"  S3     {s3} (moto), with the buckets of the task file")

    raw = folder / "all_tool_use.json"
    run_skyfleet(["tasks", "export", *WORLDS, "--output", str(raw)], folder)
    dataset = raw.read_bytes()
    address = f"s3://{envs['S3_DATASET_BUCKET']}/{envs['DATA_VERSION']}/openenv/{raw.name}"
    write_object(address, dataset)
    print(f"  put {address}")

    words = ["skyfleet", "worlds", "serve", str(raw), "--protocol", "fleet"]
    stack.enter_context(serve([*words, "--port", fleet.rpartition(":")[2]], folder / "fleet.log"))
    wait_until(lambda: is_up(fleet), "the Fleet server answers")
    print(f"  Fleet  {fleet} (skyfleet worlds serve --protocol fleet)")
    slack = stack.enter_context(serve_alerts())
    print(f"  Slack  {slack.url} (tests/fakes/alert_server.py)")
    return dataset, slack


@contextmanager
def serve(words: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until the block ends; what it prints is in `log`."""
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", *words],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def is_up(url: str) -> bool:
    try:
        httpx.get(url, timeout=120)
    except httpx.TransportError:
        return False
    return True
