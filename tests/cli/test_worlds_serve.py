"""`skyfleet worlds serve` serves on localhost only, until it is interrupted."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
from tests.fakes.serving import serving

from skyfleet.chat.message import Message, ToolCall
from skyfleet.cli.main import app
from skyfleet.cli.worlds import _app
from skyfleet.envs.openenv.client import openenv_factory
from skyfleet.envs.openenv.session import OpenEnvSettings
from skyfleet.errors import ConfigError, EnvError
from skyfleet.tasks.loading import write_tasks
from skyfleet.tasks.task import Task
from skyfleet.trainer.tasks import load_sources

SOURCE = "world:github?split=train&count=2"


@pytest.mark.parametrize(
    ("protocol", "path", "status"),
    [("openenv", "/health", 200), ("mcp", "/some_task/mcp", 405), ("fleet", "/v1/account", 200)],
)
def test_a_server_listens_on_localhost_only_and_exits_on_an_interrupt(
    protocol: str, path: str, status: int
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    args = ["worlds", "serve", SOURCE, "--protocol", protocol, "--port", str(port)]
    server = subprocess.Popen(
        [sys.executable, "-m", "skyfleet.cli.main", *args],
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
        assert _listening(server.pid) == {("127.0.0.1", port)}
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=20)


@pytest.mark.slow  # openenv checks for idle sessions every five seconds
async def test_an_idle_openenv_session_frees_its_slot_after_its_ttl() -> None:
    tasks = load_sources([SOURCE], key="SOURCE")
    app = _app("openenv", tasks, max_sessions=1, ttl_seconds=1)
    async with serving(app) as url:
        waits = {"capacity_wait_seconds": 0.1}, {"capacity_wait_seconds": 10}
        idle, refused, patient = [
            await openenv_factory(OpenEnvSettings(base_url=url, **wait))(tasks[0])
            for wait in (waits[0], *waits)
        ]
        await idle.reset()
        with pytest.raises(EnvError, match="at capacity: 1/1 sessions active"):
            await refused.reset()
        await patient.reset()
        call = ToolCall(id="call_0", name="list_issues", arguments={})
        with pytest.raises(EnvError, match="was idle too long; connect again"):
            await idle.step(Message(role="assistant", tool_calls=(call,)))
        for env in (idle, refused, patient):
            await env.close()


def _listening(pid: int) -> set[tuple[str, int]]:
    found = psutil.Process(pid).net_connections(kind="inet")
    return {tuple(one.laddr) for one in found if one.status == psutil.CONN_LISTEN}


def _answer(url: str, headers: dict[str, str]) -> httpx.Response:
    for _ in range(100):
        try:
            return httpx.get(url, headers=headers)
        except httpx.ConnectError:
            time.sleep(0.1)
    raise AssertionError(f"{url} never answered")


def test_a_port_in_use_is_a_config_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        args = [
            "worlds",
            "serve",
            SOURCE,
            "--protocol",
            "mcp",
            "--port",
            str(taken.getsockname()[1]),
        ]
        with pytest.raises(ConfigError, match="Address already in use; choose another"):
            app(args, standalone_mode=False)


def test_tasks_of_an_unknown_world_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    write_tasks(file, [Task(key="k", env_key="instacart", prompt="p")])
    for more in ([], ["--dry-run"]):
        with pytest.raises(ConfigError, match="world 'instacart' is unknown"):
            app(["worlds", "serve", str(file), *more], standalone_mode=False)


@pytest.mark.parametrize("name", ["Bad Name", "github"])
def test_a_dry_run_refuses_an_invalid_world_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"NAME='{name}'"):
        app(["worlds", "new", name, "--dry-run"], standalone_mode=False)
