"""Routes of the Fleet service: instances, environments, tasks and verifiers, as fleet-python reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from skyfleet.tasks.task import Task
from skyfleet.worlds.catalog import WORLD_NAMES
from skyfleet.worlds.fleet_server import verification
from skyfleet.worlds.fleet_server.http import HttpError, read_body
from skyfleet.worlds.fleet_server.instances import (
    CreateRequest,
    Instance,
    InstancePool,
    find_world,
)

_TEAM = "local"
_VERSION = "v1"


def build_service_routes(
    instances: InstancePool, tasks: Sequence[Task], *, runner_token: str
) -> list[Route]:
    listing = TaskListing(tasks)

    async def token(request: Request) -> Response:
        return JSONResponse({"token": runner_token})

    return [
        Route("/v1/runner-auth/token", token),
        *_instance_routes(instances),
        *_listing_routes(instances, listing),
        *_verifier_routes(instances, listing),
    ]


def _instance_routes(instances: InstancePool) -> list[Route]:
    async def create(request: Request) -> Response:
        body = await read_body(request, CreateRequest)
        created = instances.create(body, request.headers.get("x-request-id"))
        return JSONResponse(describe_instance(created, str(request.base_url)))

    async def show_all(request: Request) -> Response:
        run_id = request.query_params.get("run_id")
        listed = [one for one in instances if run_id in (None, one.request.run_id)]
        return JSONResponse([describe_instance(one, str(request.base_url)) for one in listed])

    async def show(request: Request) -> Response:
        found = instances.get(request.path_params["instance_id"])
        return JSONResponse(describe_instance(found, str(request.base_url)))

    async def heartbeat(request: Request) -> Response:
        found = instances.get(request.path_params["instance_id"])
        found.record_heartbeat()
        return JSONResponse(describe_heartbeat(found))

    async def close(request: Request) -> Response:
        found = instances.get(request.path_params["instance_id"])
        instances.close(found)
        return JSONResponse(describe_instance(found, str(request.base_url), status="stopped"))

    async def close_run(request: Request) -> Response:
        run_id = request.query_params.get("run_id")
        if run_id is None:
            raise HttpError(400, "run_id is missing; add the run whose instances to close")
        closed = [one for one in instances if one.request.run_id == run_id]
        for one in closed:
            instances.close(one)
        base_url = str(request.base_url)
        return JSONResponse([describe_instance(one, base_url, status="stopped") for one in closed])

    return [
        Route("/v1/env/instances", create, methods=["POST"]),
        Route("/v1/env/instances", show_all),
        Route("/v1/env/instances/batch", close_run, methods=["DELETE"]),
        Route("/v1/env/instances/{instance_id}", show),
        Route("/v1/env/instances/{instance_id}", close, methods=["DELETE"]),
        Route("/v1/env/instances/{instance_id}/heartbeat", heartbeat, methods=["POST"]),
    ]


def _listing_routes(instances: InstancePool, tasks: TaskListing) -> list[Route]:
    async def worlds(request: Request) -> Response:
        return JSONResponse([describe_world(name) for name in WORLD_NAMES])

    async def world(request: Request) -> Response:
        return JSONResponse(describe_world(request.path_params["env_key"]))

    async def regions(request: Request) -> Response:
        return JSONResponse(["local"])

    async def account(request: Request) -> Response:
        return JSONResponse(describe_account(len(tuple(instances)), instances.limit))

    async def all_tasks(request: Request) -> Response:
        query = request.query_params
        rows = tasks.select(env_key=query.get("env_key"), keys=query.getlist("task_keys"))
        return JSONResponse({"tasks": rows, "total": len(rows)})

    async def task(request: Request) -> Response:
        return JSONResponse(tasks.row(request.path_params["key"]))

    return [
        Route("/v1/env/", worlds),
        Route("/v1/env/{env_key}", world),
        Route("/v1/regions", regions),
        Route("/v1/account", account),
        Route("/v1/tasks", all_tasks),
        Route("/v1/tasks/{key}", task),
    ]


def _verifier_routes(instances: InstancePool, tasks: TaskListing) -> list[Route]:
    sources = verification.SourceCache()

    async def check(request: Request) -> Response:
        return JSONResponse({"success": request.query_params.get("sha256", "") in sources})

    async def execute(request: Request) -> Response:
        body = await read_body(request, verification.ExecuteRequest)
        instance = instances.get(verification.get_instance_id(body))
        arguments, code = verification.parse_arguments(body), sources.find(body)
        return JSONResponse(
            await verification.execute(instance, code, arguments, timeout_seconds=body.timeout)
        )

    async def show(request: Request) -> Response:
        return JSONResponse(tasks.verifier(request.path_params["key"]))

    return [
        Route("/v1/verifiers/check", check),
        Route("/v1/verifiers/execute", execute, methods=["POST"]),
        Route("/v1/verifiers/{key}", show),
    ]


def describe_instance(one: Instance, base_url: str, *, status: str = "running") -> dict[str, Any]:
    root = f"{base_url}instances/{one.id}/"
    manager = f"{root}api/v1/env"
    created_at = one.created_at.isoformat()
    return {
        "instance_id": one.id,
        "env_key": one.request.env_key,
        "version": one.request.env_version or _VERSION,
        "status": status,
        "subdomain": one.id,
        "created_at": created_at,
        "updated_at": created_at,
        "team_id": _TEAM,
        "region": one.request.region or "local",
        "env_variables": one.variables,
        "data_key": f"seed-{one.data_seed}",
        "data_version": one.request.data_version,
        "run_id": one.request.run_id,
        "heartbeat_interval": one.request.heartbeat_interval,
        "health": status == "running",
        "urls": {
            "root": root,
            "app": [root],
            "manager": {
                "api": manager,
                "docs": f"{manager}/docs",
                "reset": f"{manager}/reset",
                "diff": f"{manager}/diff/structured",
                "snapshot": f"{manager}/snapshot",
                "execute_verifier_function": f"{manager}/execute_verifier_function",
                "execute_verifier_function_with_upload": f"{manager}/execute_verifier_function",
            },
        },
    }


def describe_heartbeat(one: Instance) -> dict[str, Any]:
    now, interval = datetime.now(UTC), one.request.heartbeat_interval
    return {
        "success": True,
        "instance_id": one.id,
        "last_heartbeat": now.isoformat() if interval else None,
        "deadline_timestamp": now.timestamp() + one.seconds_left if interval else None,
        "interval_seconds": interval,
    }


def describe_world(name: str) -> dict[str, Any]:
    find_world(name)
    return {
        "env_key": name,
        "name": name,
        "description": f"The embedded world {name}.",
        "default_version": _VERSION,
        "versions": {_VERSION: _VERSION},
    }


def describe_account(instance_count: int, instance_limit: int) -> dict[str, Any]:
    return {
        "team_id": _TEAM,
        "team_name": _TEAM,
        "instance_limit": instance_limit,
        "instance_count": instance_count,
    }


class TaskListing:
    """The tasks of a server: prompt, data and verifier, without the reference solution."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = {task.key: task for task in tasks}
        self._listed_at = datetime.now(UTC).isoformat()

    def select(self, *, env_key: str | None, keys: Sequence[str]) -> list[dict[str, Any]]:
        """Return all tasks, or those of an env or with these keys."""
        return [
            self._row(task)
            for task in self._tasks.values()
            if env_key in (None, task.env_key) and (not keys or task.key in keys)
        ]

    def row(self, key: str) -> dict[str, Any]:
        return self._row(self._find(key))

    def verifier(self, key: str) -> dict[str, Any]:
        """Return the verifier of a task; its id is the task's key."""
        task = self._find(key)
        if task.verifier_code is None:
            raise HttpError(400, f"task '{key}' has no verifier_code; add one")
        return self._verifier(task.key, task.verifier_code)

    def _find(self, key: str) -> Task:
        if key not in self._tasks:
            raise HttpError(400, f"task '{key}' does not exist; /v1/tasks lists the tasks")
        return self._tasks[key]

    def _row(self, task: Task) -> dict[str, Any]:
        code = task.verifier_code
        return {
            "key": task.key,
            "prompt": task.prompt,
            "team_id": _TEAM,
            "environment_id": task.env_key,
            "created_at": self._listed_at,
            "verifier_id": task.key if code else None,
            "verifier": self._verifier(task.key, code) if code else None,
            "version": task.env_version,
            "data_id": task.data_key,
            "data_version": task.data_version,
            "env_variables": task.env_variables,
            "metadata": task.metadata,
        }

    def _verifier(self, key: str, code: str) -> dict[str, Any]:
        return {
            "verifier_id": key,
            "key": key,
            "version": 1,
            "sha256": hashlib.sha256(code.encode()).hexdigest(),
            "code": code,
            "created_at": self._listed_at,
        }
