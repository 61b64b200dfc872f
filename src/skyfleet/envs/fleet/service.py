"""FleetService: a client of Fleet's REST API for one episode."""

from __future__ import annotations

import asyncio
import base64
import logging
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import httpx

from skyfleet.envs.fleet.bundles import digest, pack
from skyfleet.envs.fleet.settings import FleetSettings
from skyfleet.envs.tls import tls_context
from skyfleet.errors import EnvError
from skyfleet.tasks.task import Task

logger = logging.getLogger(__name__)

Arguments = tuple[tuple[str | None, ...], dict[str, str | None]]
"""What a verifier is called with besides its env: positional, then keyword arguments."""

_TRANSIENT_STATUS = (429, 500, 502, 503, 504)
_TRANSIENT_WORDS = (
    "health check",
    "timeout",
    "connection",
    "temporarily",
    '"retryable": true',
    '"retryable":true',
    "rate limit",
    "too many in-flight",
    "instance limit",
)
_CONNECT_SECONDS = 30
_IDLE_SECONDS = 2
"""Then a connection is not used again. Many servers close one after 5 s, as httpx does: a call that was
sent just then would be lost, and a call that may change something is not repeated."""
_RESET_SECONDS = 10
_SHORT_SECONDS = 30
_VERIFIER_SECONDS = 60
"""The service's own limit for a verifier; the settings limit how long we wait for its answer."""
_ENDED = 410
_GONE = (404, _ENDED)
_TOKEN_REJECTED = (401, 404)
"""The answers of an instance to requests without a valid token."""


class InstanceEndedError(EnvError):
    """The instance is closed or its ttl is over, so no request can succeed any more."""


def check_not_ended(answer: httpx.Response) -> httpx.Response:
    """Raise InstanceEndedError if the answer says that the instance is gone for good."""
    if answer.status_code == _ENDED:
        raise InstanceEndedError(
            f"the instance has ended: {answer.status_code} {answer.text[:200]}; if its time was "
            "over, raise environment.skyrl_gym.fleet_task.ttl_seconds"
        )
    return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteInstance:
    id: str
    root: str
    """Ends with a slash."""
    manager: str

    @classmethod
    def from_response(cls, answer: httpx.Response) -> RemoteInstance:
        try:
            body = answer.json()
            root, manager = str(body["urls"]["root"]), str(body["urls"]["manager"]["api"])
            return cls(id=str(body["instance_id"]), root=root.rstrip("/") + "/", manager=manager)
        except (ValueError, KeyError, TypeError) as error:
            text = answer.text[:200]
            raise EnvError(f"{answer.url} answered {text!r}, which is not an instance") from error


@dataclass(slots=True)
class RunnerToken:
    """The token that Fleet may require on an instance's own routes, shared by all episodes."""

    value: str | None = None
    """None until Fleet has answered; empty if it uses no tokens."""

    def invalidate(self, rejected: str) -> None:
        """Drop the token unless another episode has already renewed it."""
        if self.value == rejected:
            self.value = None


class FleetService:
    """One episode's connection to Fleet.

    Every episode has its own pool: every instance has a host of its own, and httpx scans all
    connections of a pool per request, so 64 episodes on one pool are three times slower.
    """

    def __init__(self, settings: FleetSettings, token: RunnerToken) -> None:
        self.settings, self._token = settings, token
        self._http: httpx.AsyncClient | None = None

    def open(self) -> None:
        headers = {"Authorization": f"Bearer {self.settings.api_key}"}
        limits = httpx.Limits(keepalive_expiry=_IDLE_SECONDS)
        self._http = httpx.AsyncClient(verify=tls_context(), headers=headers, limits=limits)

    async def close(self) -> None:
        if self._http is not None:
            http, self._http = self._http, None
            await http.aclose()

    async def send(
        self, method: str, url: str, *, seconds: float, **options: Any
    ) -> httpx.Response:
        """Return any answer, whatever its status; httpx.TransportError if there is none."""
        if self._http is None:
            raise EnvError("the connection to Fleet is not open; call reset first")
        if url.startswith("/"):
            url = self.settings.base_url.rstrip("/") + url
        timeout = httpx.Timeout(seconds, connect=min(seconds, _CONNECT_SECONDS))
        return await self._http.request(method, url, timeout=timeout, **options)

    async def send_to_instance(
        self, url: str, *, seconds: float, json: Any, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        """POST with the runner token; send again if the token has been replaced."""

        async def post(token: str) -> httpx.Response:
            authorization = {"X-Runner-Token": token} if token else {}
            return await self.send(
                "POST",
                url,
                seconds=seconds,
                json=json,
                headers={**authorization, **(headers or {})},
            )

        token = await self._get_runner_token()
        answer = await post(token)
        if answer.status_code in _TOKEN_REJECTED:
            self._token.invalidate(token)
            renewed = await self._get_runner_token()
            # An unauthorised request has changed nothing, so a retry is safe.
            if renewed not in ("", token):
                return await post(renewed)
        return answer

    async def provision(self, task: Task) -> RemoteInstance:
        """Create an instance. Only transient failures are retried."""
        settings, request_id, problem = self.settings, str(uuid4()), ""
        for wait_seconds in [*settings.waits_seconds(settings.provisioning_tries), None]:
            try:
                answer = await self._request_instance(task, request_id)
            except httpx.TransportError as error:
                # Retry with the same id: if the instance was created after all, we get that one.
                problem = repr(error)
            else:
                if answer.is_success:
                    return RemoteInstance.from_response(answer)
                problem, request_id = f"{answer.status_code} {answer.text[:300]}", str(uuid4())
                if answer.status_code == 401:
                    problem += "; check FLEET_API_KEY"
                if not _is_transient(answer):
                    break
            if wait_seconds is not None:
                await asyncio.sleep(wait_seconds)
        raise EnvError(f"env_key={task.env_key!r}: Fleet created no instance: {problem}")

    async def reset(self, instance: RemoteInstance) -> None:
        """Best effort: a new instance is in its seeded state anyway."""
        try:
            answer = await self.send_to_instance(
                f"{instance.manager}/reset", seconds=_RESET_SECONDS, json={}
            )
            answer.raise_for_status()
        except httpx.HTTPError as error:
            logger.warning("instance %s was not reset: %r", instance.id, error)

    async def execute_verifier(
        self, instance: RemoteInstance, task: Task, code: str, function: str, arguments: Arguments
    ) -> dict[str, Any]:
        """Execute the verifier once on the service; httpx.HTTPError if there is no verdict."""
        positional, named = arguments
        bundle, args_array = pack(code), [*positional, {"env": instance.id}]
        pickled = pickle.dumps({"args": (None, *args_array), "kwargs": named}, protocol=4)
        answer = await self.send(
            "POST",
            "/v1/verifiers/execute",
            seconds=self.settings.verifier_timeout_seconds,
            json={
                "key": task.key,
                "sha256": digest(bundle),
                "bundle": base64.b64encode(bundle).decode(),
                "args": base64.b64encode(pickled).decode(),
                "args_array": args_array,
                "function_name": function,
                "timeout": _VERIFIER_SECONDS,
                "region": "us-west-1",
            },
        )
        return dict(check_not_ended(answer).raise_for_status().json())

    async def delete(self, instance: RemoteInstance) -> None:
        """Try three times; an instance that remains ends at its ttl."""
        for wait_seconds in [*self.settings.waits_seconds(3), None]:
            try:
                answer = await self.send(
                    "DELETE", f"/v1/env/instances/{instance.id}", seconds=_SHORT_SECONDS
                )
                if answer.is_success or answer.status_code in _GONE:
                    return
                problem = f"{answer.status_code} {answer.text[:300]}"
            except httpx.TransportError as error:
                problem = repr(error)
            if wait_seconds is not None:
                await asyncio.sleep(wait_seconds)
        raise EnvError(f"instance {instance.id} was not deleted, its ttl will end it: {problem}")

    async def _get_runner_token(self) -> str:
        """Return the token; empty if there is none or Fleet does not answer."""
        if self._token.value is None:
            try:
                answer = await self.send("GET", "/v1/runner-auth/token", seconds=_SHORT_SECONDS)
                # A server without this route has no tokens and is not asked again.
                body = {} if answer.status_code == 404 else answer.raise_for_status().json()
                self._token.value = str(body.get("token") or "")
            except (httpx.HTTPError, ValueError, AttributeError) as error:
                logger.warning("Fleet returned no runner token, retrying later: %r", error)
        return self._token.value or ""

    async def _request_instance(self, task: Task, request_id: str) -> httpx.Response:
        seconds = self.settings.provisioning_timeout_seconds
        fields = {
            "env_key": task.env_key,
            "env_version": _format_version(task.env_version),
            "data_key": task.data_key,
            "data_version": _format_version(task.data_version),
            "env_variables": task.env_variables or None,
            "image_type": "mcp" if task.modality == "computer_use" else None,
            "created_from": "sdk",
            "ttl_seconds": self.settings.ttl_seconds,
            # The service gives up before we do, so that we receive its reason.
            "max_wait_seconds": max(0, int(seconds) - 30),
        }
        answer = await self.send(
            "POST",
            "/v1/env/instances",
            seconds=seconds,
            headers={"X-Request-ID": request_id},
            json={key: value for key, value in fields.items() if value is not None},
        )
        existing = _find_existing(answer)
        if existing is None:
            return answer
        return await self.send("GET", f"/v1/env/instances/{existing}", seconds=_SHORT_SECONDS)


def _format_version(version: str | None) -> str | None:
    return f"v{version}" if version and version[0].isdigit() else version


def _is_transient(answer: httpx.Response) -> bool:
    text = answer.text.lower()
    return answer.status_code in _TRANSIENT_STATUS or any(word in text for word in _TRANSIENT_WORDS)


def _find_existing(answer: httpx.Response) -> str | None:
    """Return the id of the instance that an earlier try of the same request created."""
    if answer.status_code != 409:
        return None
    try:
        detail = answer.json()["detail"]
        return str(detail["instance_id"]) if detail["error"] == "duplicate_request_id" else None
    except (ValueError, KeyError, TypeError):
        return None
