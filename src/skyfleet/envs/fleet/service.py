"""FleetService: Fleet's REST interface, for one episode."""

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
from skyfleet.envs.tls import certificates
from skyfleet.errors import EnvError
from skyfleet.tasks.task import Task

logger = logging.getLogger(__name__)

Arguments = tuple[tuple[str | None, ...], dict[str, str | None]]
"""What a verifier is called with beside its env: by place, then by name."""

_TRANSIENT_STATUS = (429, 502, 503, 504)
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
_RESET_SECONDS = 10
_SHORT_SECONDS = 30
_VERIFIER_SECONDS = 60
"""What the service gives a verifier; the settings say how long we wait for its answer."""
_GONE = (404, 410)
_TOKEN_REFUSED = (401, 404)
"""How an instance's routes answer whoever lacks the token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteInstance:
    id: str
    root: str
    """Ends with a slash."""
    manager: str

    @classmethod
    def of(cls, answer: httpx.Response) -> RemoteInstance:
        try:
            made = answer.json()
            root, manager = str(made["urls"]["root"]), str(made["urls"]["manager"]["api"])
            return cls(id=str(made["instance_id"]), root=root.rstrip("/") + "/", manager=manager)
        except (ValueError, KeyError, TypeError) as error:
            said = answer.text[:200]
            raise EnvError(f"{answer.url} answered {said!r}, which is no instance") from error


@dataclass(slots=True)
class RunnerToken:
    """What Fleet may want on an instance's own routes, shared by all episodes."""

    value: str | None = None
    """None until Fleet has said; empty where it has none."""

    def forget(self, refused: str) -> None:
        """Unless another episode has already renewed it."""
        if self.value == refused:
            self.value = None


class FleetService:
    """One episode's way to Fleet.

    Its connections are its own: every instance has a host of its own, and httpx looks through all
    connections of a pool at every request, so that 64 episodes on one pool are three times slower.
    """

    def __init__(self, settings: FleetSettings, token: RunnerToken) -> None:
        self.settings, self._token = settings, token
        self._http: httpx.AsyncClient | None = None

    def open(self) -> None:
        headers = {"Authorization": f"Bearer {self.settings.api_key}"}
        self._http = httpx.AsyncClient(verify=certificates(), headers=headers)

    async def close(self) -> None:
        if self._http is not None:
            http, self._http = self._http, None
            await http.aclose()

    async def send(
        self, method: str, url: str, *, seconds: float, **options: Any
    ) -> httpx.Response:
        """Any answer, whatever its status; httpx.TransportError where there is none."""
        if self._http is None:
            raise EnvError("the way to Fleet is not open; call reset first")
        if url.startswith("/"):
            url = self.settings.base_url.rstrip("/") + url
        timeout = httpx.Timeout(seconds, connect=min(seconds, _CONNECT_SECONDS))
        return await self._http.request(method, url, timeout=timeout, **options)

    async def send_to_instance(
        self, url: str, *, seconds: float, json: Any, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        """A POST with the runner token; sent again where that turns out to have been replaced."""

        async def post(token: str) -> httpx.Response:
            given = {"X-Runner-Token": token} if token else {}
            return await self.send(
                "POST", url, seconds=seconds, json=json, headers={**given, **(headers or {})}
            )

        token = await self._runner_token()
        answer = await post(token)
        if answer.status_code in _TOKEN_REFUSED:
            self._token.forget(token)
            renewed = await self._runner_token()
            # Who was refused at the door has done nothing yet, so that asking again is safe.
            if renewed not in ("", token):
                return await post(renewed)
        return answer

    async def provision(self, task: Task) -> RemoteInstance:
        """Make an instance. Only what may pass by itself is tried again."""
        settings, request_id, problem = self.settings, str(uuid4()), ""
        for wait_seconds in [*settings.waits_seconds(settings.provisioning_tries), None]:
            try:
                answer = await self._ask_for_instance(task, request_id)
            except httpx.TransportError as error:
                # Under the same id: if it was made after all, it is the one we are given.
                problem = repr(error)
            else:
                if answer.is_success:
                    return RemoteInstance.of(answer)
                problem, request_id = f"{answer.status_code} {answer.text[:300]}", str(uuid4())
                if answer.status_code == 401:
                    problem += "; check FLEET_API_KEY"
                if not _transient(answer):
                    break
            if wait_seconds is not None:
                await asyncio.sleep(wait_seconds)
        raise EnvError(f"env_key={task.env_key!r}: Fleet made no instance: {problem}")

    async def reset(self, instance: RemoteInstance) -> None:
        """Best effort: an instance that was just made is as seeded anyway."""
        try:
            answer = await self.send_to_instance(
                f"{instance.manager}/reset", seconds=_RESET_SECONDS, json={}
            )
            answer.raise_for_status()
        except httpx.HTTPError as error:
            logger.warning("instance %s was not reset: %r", instance.id, error)

    async def execute_verifier(
        self, instance: RemoteInstance, task: Task, code: str, function: str, said: Arguments
    ) -> dict[str, Any]:
        """One execution on the service; httpx.HTTPError where it gives no verdict."""
        positional, named = said
        bundle, args_array = pack(code), [*positional, {"env": instance.id}]
        arguments = pickle.dumps({"args": (None, *args_array), "kwargs": named}, protocol=4)
        answer = await self.send(
            "POST",
            "/v1/verifiers/execute",
            seconds=self.settings.verifier_timeout_seconds,
            json={
                "key": task.key,
                "sha256": digest(bundle),
                "bundle": base64.b64encode(bundle).decode(),
                "args": base64.b64encode(arguments).decode(),
                "args_array": args_array,
                "function_name": function,
                "timeout": _VERIFIER_SECONDS,
                "region": "us-west-1",
            },
        )
        return dict(answer.raise_for_status().json())

    async def delete(self, instance: RemoteInstance) -> None:
        """Three tries; Fleet's own clock ends what is left over."""
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

    async def _runner_token(self) -> str:
        """Empty where there is none, or for now where Fleet does not say."""
        if self._token.value is None:
            try:
                answer = await self.send("GET", "/v1/runner-auth/token", seconds=_SHORT_SECONDS)
                # A Fleet without this route has no tokens, and need not be asked at every call.
                said = {} if answer.status_code == 404 else answer.raise_for_status().json()
                self._token.value = str(said.get("token") or "")
            except (httpx.HTTPError, ValueError, AttributeError) as error:
                logger.warning("Fleet gave no runner token, asking again later: %r", error)
        return self._token.value or ""

    async def _ask_for_instance(self, task: Task, request_id: str) -> httpx.Response:
        seconds = self.settings.provisioning_timeout_seconds
        wanted = {
            "env_key": task.env_key,
            "env_version": _version(task.env_version),
            "data_key": task.data_key,
            "data_version": _version(task.data_version),
            "env_variables": task.env_variables or None,
            "image_type": "mcp" if task.modality == "computer_use" else None,
            "created_from": "sdk",
            "ttl_seconds": self.settings.ttl_seconds,
            # The service gives up before we do, so that we hear why.
            "max_wait_seconds": max(0, int(seconds) - 30),
        }
        answer = await self.send(
            "POST",
            "/v1/env/instances",
            seconds=seconds,
            headers={"X-Request-ID": request_id},
            json={key: value for key, value in wanted.items() if value is not None},
        )
        made = _already_made(answer)
        if made is None:
            return answer
        return await self.send("GET", f"/v1/env/instances/{made}", seconds=_SHORT_SECONDS)


def _version(version: str | None) -> str | None:
    return f"v{version}" if version and version[0].isdigit() else version


def _transient(answer: httpx.Response) -> bool:
    text = answer.text.lower()
    return answer.status_code in _TRANSIENT_STATUS or any(word in text for word in _TRANSIENT_WORDS)


def _already_made(answer: httpx.Response) -> str | None:
    """The id of the instance that an earlier try of the same request had made."""
    if answer.status_code != 409:
        return None
    try:
        detail = answer.json()["detail"]
        return str(detail["instance_id"]) if detail["error"] == "duplicate_request_id" else None
    except (ValueError, KeyError, TypeError):
        return None
