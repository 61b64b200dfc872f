"""A Fleet-compatible server behind a network that is not to be relied on."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from tests.fakes.serving import nothing_left, serving

from skyfleet.envs.env import EnvFactory
from skyfleet.envs.fleet.env import fleet_factory
from skyfleet.envs.fleet.settings import FleetSettings
from skyfleet.envs.verifiers.grading import shared_jail
from skyfleet.rollouts.episode import Limits, run_episode
from skyfleet.rollouts.scripted_agents import oracle_policy
from skyfleet.tasks.task import Task
from skyfleet.trajectories.trajectory import Trajectory
from skyfleet.worlds.catalog import generate_world_tasks
from skyfleet.worlds.fleet_server.server import build_fleet_app

KEY = "local-key"
LIMITS = Limits(max_turns=20, max_input_length=10**6, trajectory_timeout_seconds=60)
TASKS = generate_world_tasks("github", split="all", count=12)
WRITING = next(task for task in TASKS if task.metadata["template"] == "close_by_title")

Fault = Callable[[str, bytes], str | None]
"""What goes wrong with a request, by its path and body: refuse, fail, deny, hang, cut,
or forget."""


class Faulty:
    """A server whose network is not to be relied on."""

    def __init__(self, app: Any, fault: Fault) -> None:
        self._app, self._fault = app, fault
        self.seen: list[str] = []
        self.tokens: list[str | None] = []
        """The runner token of each request seen."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        body = await request.body()
        self.seen.append(f"{scope['path']} {body.decode()}")
        self.tokens.append(request.headers.get("x-runner-token"))
        fault = self._fault(scope["path"], body)
        if fault == "refuse":
            await Response("bad gateway", 502)(scope, receive, send)
        elif fault == "fail":
            await Response("internal error", 500)(scope, receive, send)
        elif fault == "deny":
            await Response("not found", 404)(scope, receive, send)
        elif fault == "hang":
            await asyncio.sleep(30)
        elif fault == "cut":
            await _cut(send)
        else:
            await self._app(scope, _replayed(body), _silent if fault == "forget" else send)
            if fault == "forget":
                await _cut(send)


async def _silent(message: Any) -> None:
    """The work is done, and no response is sent."""


async def _cut(send: Any) -> None:
    """Close the connection in the middle of an answer."""
    headers = [(b"content-length", b"100")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"{", "more_body": False})


def _replayed(body: bytes) -> Any:
    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


PATIENT = {
    "call_deadline_seconds": 60,
    "tools_deadline_seconds": 60,
    "provisioning_timeout_seconds": 60,
    "verifier_timeout_seconds": 60,
}
"""For tests in which nothing hangs: a busy machine takes its time."""


def quick_settings(base_url: str, **changes: Any) -> FleetSettings:
    quick: dict[str, Any] = {
        "first_wait_seconds": 0.01,
        "call_deadline_seconds": 1.5,
        "tools_deadline_seconds": 1.2,
        "provisioning_timeout_seconds": 0.4,
        "provisioning_tries": 3,
        "verifier_timeout_seconds": 5,
        "verifier_tries": 2,
    }
    return FleetSettings(api_key=KEY, base_url=base_url, **quick | changes)


@asynccontextmanager
async def faulty_fleet(
    fault: Fault | None = None, **changes: Any
) -> AsyncIterator[tuple[EnvFactory, Any, Faulty]]:
    """A factory, the server's instances, its faulty front. All that is made must be deleted."""
    await start_jail()
    app = build_fleet_app(TASKS, api_key=KEY)
    faulty = Faulty(app, fault or (lambda path, body: None))
    if fault is None:
        changes = PATIENT | changes
    async with nothing_left(), serving(faulty) as base_url:
        yield fleet_factory(quick_settings(base_url, **changes)), app.state.instances, faulty
        instances = app.state.instances
        assert instances.created == instances.deleted


async def played(task: Task, open_env: EnvFactory) -> Trajectory:
    return await run_episode(task, open_env, oracle_policy, LIMITS)


async def start_jail() -> None:
    """All its workers stay when a test is over, so none is to begin inside of one."""
    async with asyncio.TaskGroup() as group:
        for _ in range(os.cpu_count() or 1):
            group.create_task(shared_jail().verify("def main(env): return 1", b"", b"", None))
