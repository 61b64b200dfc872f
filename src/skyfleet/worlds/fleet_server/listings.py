"""Listings: instances, worlds and tasks in the shapes that fleet-python reads."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from skyfleet.tasks.task import Task
from skyfleet.worlds.fleet_server.http import RefusalError
from skyfleet.worlds.fleet_server.instances import Instance, find_world

_TEAM = "local"
_VERSION = "v1"


def instance(one: Instance, base_url: str, *, status: str = "running") -> dict[str, Any]:
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


def heartbeat(one: Instance) -> dict[str, Any]:
    now, interval = datetime.now(UTC), one.request.heartbeat_interval
    return {
        "success": True,
        "instance_id": one.id,
        "last_heartbeat": now.isoformat() if interval else None,
        "deadline_timestamp": now.timestamp() + one.seconds_left if interval else None,
        "interval_seconds": interval,
    }


def world(name: str) -> dict[str, Any]:
    find_world(name)
    return {
        "env_key": name,
        "name": name,
        "description": f"The embedded world {name}.",
        "default_version": _VERSION,
        "versions": {_VERSION: _VERSION},
    }


def account(instance_count: int, instance_limit: int) -> dict[str, Any]:
    return {
        "team_id": _TEAM,
        "team_name": _TEAM,
        "instance_limit": instance_limit,
        "instance_count": instance_count,
    }


class Tasks:
    """The tasks a server offers: prompt, data and verifier, never the reference solution."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = {task.key: task for task in tasks}
        self._offered_at = datetime.now(UTC).isoformat()

    def chosen(self, *, env_key: str | None, keys: Sequence[str]) -> list[dict[str, Any]]:
        """All of them, or those of an env, or those with these keys."""
        return [
            self._row(task)
            for task in self._tasks.values()
            if env_key in (None, task.env_key) and (not keys or task.key in keys)
        ]

    def row(self, key: str) -> dict[str, Any]:
        return self._row(self._find(key))

    def verifier(self, key: str) -> dict[str, Any]:
        """A task's verifier goes by the task's key."""
        task = self._find(key)
        if task.verifier_code is None:
            raise RefusalError(400, f"task '{key}' has no verifier_code; give it one")
        return self._verifier(task.key, task.verifier_code)

    def _find(self, key: str) -> Task:
        if key not in self._tasks:
            raise RefusalError(400, f"task '{key}' is not offered here; list /v1/tasks")
        return self._tasks[key]

    def _row(self, task: Task) -> dict[str, Any]:
        code = task.verifier_code
        return {
            "key": task.key,
            "prompt": task.prompt,
            "team_id": _TEAM,
            "environment_id": task.env_key,
            "created_at": self._offered_at,
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
            "created_at": self._offered_at,
        }
