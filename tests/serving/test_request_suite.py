"""Every server refuses hostile requests with the right status, stays alive and keeps its memory."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.analysis.viewer_run import viewing, write_run
from tests.fakes.serving import serving
from tests.fakes.tiny_policy import tiny_policy
from tests.serving.hostile_requests import LIMIT, TOKEN, Case, Kind, list_cases, send_raw

from skyfleet.analysis.viewer.server import ViewerAccess
from skyfleet.chat.message import Message
from skyfleet.envs.agent_gateway import AgentGateway
from skyfleet.envs.mcp.server import mcp_app
from skyfleet.envs.openenv.server import openenv_app
from skyfleet.serving.access import AccessPolicy
from skyfleet.serving.requests import ChatCompletionRequest
from skyfleet.tasks.task import Task
from skyfleet.tracking.prometheus_tracker import PrometheusTracker
from skyfleet.trainer.tasks import load_sources
from skyfleet.worlds.catalog import open_world
from skyfleet.worlds.fleet_server.server import build_fleet_app

TASKS: list[Task] = load_sources(["world:github?split=train&count=1"], key="SOURCE")
ACCESS = AccessPolicy(max_body_bytes=LIMIT)
MAX_GROWTH_BYTES = 64 * 1024 * 1024
INITIALIZE = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}}).encode()

KINDS = {
    "serve": Kind(good="GET /v1/models", post="/v1/chat/completions"),
    "openenv": Kind(good="GET /schema", post="/reset", has_websocket=True),
    "mcp": Kind(
        good=f"POST /{TASKS[0].key}/mcp", good_body=INITIALIZE, post=f"/{TASKS[0].key}/mcp"
    ),
    "fleet": Kind(good="GET /v1/account", post="/v1/env/instances"),
    "agent": Kind(good="GET /v1/models", post="/v1/chat/completions", needs_token=False),
    "metrics": Kind(good="GET /metrics", post="/metrics", splits_at_carriage_returns=True),
    "view": Kind(good="GET /api/run", post="/api/run", splits_at_carriage_returns=True),
}


@asynccontextmanager
async def running(name: str, folder: Path) -> AsyncIterator[tuple[int, Kind]]:
    """The port of a server of this kind."""
    kind = KINDS[name]
    if name == "view":
        with viewing(write_run(folder, plain=4), access=ViewerAccess(token=TOKEN)) as viewer:
            yield viewer.server_port, kind
        return
    if name == "metrics":
        pytest.importorskip("prometheus_client", reason="the extra prometheus is not installed")
        tracker = PrometheusTracker(run_name="r", token=TOKEN)
        yield httpx.URL(tracker.url).port or 0, kind
        tracker.close()
        return
    if name == "agent":
        gateway = AgentGateway(ACCESS)
        url, key = gateway.register(_answer)
        yield int(url.split(":")[2].split("/")[0]), replace(kind, token=key)
        await gateway.unregister(key)
        return
    policy = tiny_policy()
    apps: dict[str, Any] = {
        "serve": lambda: policy.app(policy.engine(), api_key=TOKEN),
        "openenv": lambda: openenv_app(TASKS, open_world, max_sessions=2),
        "mcp": lambda: mcp_app(TASKS, open_world, max_sessions=500),
        "fleet": lambda: build_fleet_app(TASKS, api_key=TOKEN),
    }
    own_token = TOKEN if name in ("openenv", "mcp") else None
    async with serving(apps[name](), replace(ACCESS, token=own_token)) as url:
        yield int(url.rpartition(":")[2]), kind


async def _answer(request: ChatCompletionRequest) -> Message:
    return Message(role="assistant", content="ok")


@pytest.mark.parametrize("name", KINDS)
async def test_hostile_requests_are_refused_and_the_server_stays_alive(
    name: str, tmp_path: Path
) -> None:
    async with running(name, tmp_path) as (port, kind):
        cases = list(list_cases(kind, port))
        assert len(cases) >= 40
        good = Case(name="good", request=cases[0].request.replace(b"evil.example", b"localhost"))
        before = psutil.Process().memory_info().rss
        wrong = []
        for case in cases:
            status, response = await send_raw(port, case.request)
            if status not in case.statuses:
                wrong.append(
                    f"{case.name}: {status}, not {sorted(case.statuses)}: {response[:300]!r}"
                )
            if b"root:" in response or b"Traceback" in response or TOKEN.encode() in response:
                wrong.append(f"{case.name}: leaks {response[:300]!r}")
            alive, response = await send_raw(port, good.request)
            if alive not in kind.good_statuses:
                wrong.append(f"after {case.name}: {alive} {response[:200]!r}")
        assert not wrong, "\n".join(wrong)
        assert psutil.Process().memory_info().rss - before < MAX_GROWTH_BYTES
