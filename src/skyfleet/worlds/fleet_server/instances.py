"""Instances of worlds that clients created, one database each, open until closed or expired."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping
from datetime import UTC, date, datetime
from time import monotonic
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from skyfleet.errors import ConfigError
from skyfleet.worlds.catalog import get_world
from skyfleet.worlds.fleet_server.http import HttpError
from skyfleet.worlds.toolkit import App
from skyfleet.worlds.world import World


class CreateRequest(BaseModel):
    """The fields of a create request that a world supports; others are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    env_key: str
    env_version: str | None = None
    data_key: str | None = None
    data_version: str | None = None
    region: str | None = None
    env_variables: Mapping[str, Any] | None = None
    image_type: str | None = None
    run_id: str | None = None
    ttl_seconds: int | None = Field(None, ge=1)
    heartbeat_interval: int | None = Field(None, ge=1)

    @field_validator("image_type")
    @classmethod
    def _check_image_type(cls, value: str | None) -> str | None:
        if value == "mcp":
            raise ValueError(
                "worlds have no screen; create a tool_use instance, without image_type"
            )
        return value

    @field_validator("env_variables")
    @classmethod
    def _check_current_date(cls, value: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        if not value or "CURRENT_DATE" not in value:
            return value
        today = date.fromisoformat(str(value["CURRENT_DATE"]))
        return {**value, "CURRENT_DATE": today.isoformat()}


class Instance:
    def __init__(self, world: World, request: CreateRequest, *, ttl_seconds: int) -> None:
        self.id = secrets.token_hex(8)
        self.world, self.request = world, request
        self.data_seed = _data_seed(request.data_key)
        self.variables = world.variables(self.data_seed) | dict(request.env_variables or {})
        self.app = self._open()
        self.created_at = datetime.now(UTC)
        self._ends_at = monotonic() + (request.ttl_seconds or ttl_seconds)
        self._last_heartbeat = monotonic()

    @property
    def seconds_left(self) -> float:
        interval = self.request.heartbeat_interval
        ends_at = min(self._ends_at, self._last_heartbeat + interval) if interval else self._ends_at
        return ends_at - monotonic()

    def record_heartbeat(self) -> None:
        self._last_heartbeat = monotonic()

    def reset(self) -> None:
        self.close()
        self.app = self._open()

    def close(self) -> None:
        self.app.db.close()

    def _open(self) -> App:
        return self.world.open(self.data_seed, self.variables)


class InstancePool:
    def __init__(self, *, ttl_seconds: int, max_instances: int) -> None:
        self._ttl_seconds, self._max_instances = ttl_seconds, max_instances
        self._open: dict[str, Instance] = {}
        self._by_request_id: dict[str, str] = {}
        self.created = self.deleted = 0

    def __iter__(self) -> Iterator[Instance]:
        self.close_expired()
        return iter(tuple(self._open.values()))

    def create(self, request: CreateRequest, request_id: str | None) -> Instance:
        """Create an instance; a repeated request id returns the instance it created before."""
        self.close_expired()
        if request_id in self._by_request_id:
            return self._open[self._by_request_id[request_id]]
        if len(self._open) >= self._max_instances:
            raise HttpError(403, self._describe_limit())
        world = find_world(request.env_key)
        instance = Instance(world, request, ttl_seconds=self._ttl_seconds)
        self._open[instance.id] = instance
        if request_id is not None:
            self._by_request_id[request_id] = instance.id
        self.created += 1
        return instance

    def get(self, instance_id: str) -> Instance:
        self.close_expired()
        if instance_id not in self._open:
            raise HttpError(410, f"instance '{instance_id}' is closed; create a new one")
        return self._open[instance_id]

    def close(self, instance: Instance) -> None:
        del self._open[instance.id]
        self._by_request_id = {
            request_id: instance_id
            for request_id, instance_id in self._by_request_id.items()
            if instance_id != instance.id
        }
        self.deleted += 1
        instance.close()

    def close_all(self) -> None:
        for instance in tuple(self._open.values()):
            self.close(instance)

    def close_expired(self) -> None:
        """Close every instance past its time to live or its heartbeat deadline."""
        for instance in tuple(self._open.values()):
            if instance.seconds_left <= 0:
                self.close(instance)

    @property
    def limit(self) -> int:
        return self._max_instances

    def _describe_limit(self) -> dict[str, object]:
        # fleet-python recognizes this error by these keys and words.
        return {
            "error_type": "instance_limit_exceeded",
            "message": f"instance limit: {len(self._open)} of {self._max_instances} are open; close one",
            "running_instances": len(self._open),
            "instance_limit": self._max_instances,
        }


def find_world(name: str) -> World:
    try:
        return get_world(name)
    except ConfigError as error:
        # fleet-python recognizes this error by the words "environment" and "not found".
        raise HttpError(400, f"environment '{name}' not found: {error}") from error


def _data_seed(data_key: str | None) -> int:
    match = re.fullmatch(r"seed-(\d{1,9})", data_key or "seed-0")
    if match is None:
        raise HttpError(400, f"data_key={data_key!r}; write seed-<number>")
    return int(match[1])
