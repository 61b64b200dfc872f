"""VllmRoutes: client of vLLM's control routes over HTTP."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any, Self

import httpx

from skyfleet.engines.http_client import CONNECT_SECONDS, auth_header
from skyfleet.engines.response_body import (
    ERROR_BYTES,
    InvalidBodyError,
    Response,
    get,
    send_request,
    show_text,
)

CONTROL_TIMEOUT_SECONDS = 900.0
"""For one control call: a large model's weights may come from a slow disk."""
HEALTH_TIMEOUT_SECONDS = 10.0
MAX_CONTROL_BYTES = 1 << 26
"""Of one response: the checksums of a large model take a few MiB."""


class RouteError(Exception):
    """A route returned an error status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class VllmRoutes:
    """Client of vLLM's control routes (developer mode); `async with` closes its connections."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        """`url` is the server's root, without /v1: http://localhost:8000."""
        self.url = url
        self._client = httpx.AsyncClient(
            base_url=url,
            # As in RetryingClient: the size of a body is known while it is read.
            headers={"Accept-Encoding": "identity", **auth_header(api_key)},
            timeout=httpx.Timeout(CONTROL_TIMEOUT_SECONDS, connect=CONNECT_SECONDS),
            # Calls are minutes apart: the server may have closed a kept connection.
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def sleep(self, *, level: int, mode: str) -> None:
        await self._ask("POST", "sleep", params={"level": level, "mode": mode})

    async def wake_up(self, tags: Sequence[str] = ()) -> None:
        """Without tags, wake all memory and the scheduler."""
        await self._ask("POST", "wake_up", params={"tags": list(tags)})

    async def is_sleeping(self) -> bool:
        """True if it sleeps or is paused."""
        response = await self._ask("GET", "is_sleeping")
        match response.json():
            case {"is_sleeping": bool() as is_sleeping}:
                return is_sleeping
        raise RouteError(response.status, f"/is_sleeping returned {response.shown}")

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        await self._ask("POST", "pause", params={"mode": mode, "clear_cache": clear_cache})

    async def resume_generation(self) -> None:
        await self._ask("POST", "resume")

    async def reset_prefix_cache(self) -> None:
        """vLLM skips it while a turn runs.

        Stale entries are harmless, as `cache_salt` has the version.
        """
        await self._ask("POST", "reset_prefix_cache")

    async def collective_rpc(self, method: str, args: Sequence[Any] = ()) -> list[Any]:
        """Results that are None, mappings or lists keep their type; others become strings."""
        body = {"method": method, "args": list(args)}
        response = await self._ask("POST", "collective_rpc", json=body)
        match response.json():
            case {"results": list() as results}:
                return results
        raise RouteError(response.status, f"/collective_rpc returned {response.shown}")

    async def data_parallel_size(self) -> int:
        """Read from /server_info, because a worker of a dense model does not know it."""
        answer = await self._ask("GET", "server_info")
        found = re.search(r"\bdata_parallel_size=(\d+)", answer.text)
        if found is None:
            raise RouteError(answer.status, "/server_info has no data_parallel_size")
        return int(found[1])

    async def version(self) -> str | None:
        """The vLLM version; None for a server that is not vLLM."""
        try:
            answer = (await self._ask("GET", "version")).json()
        except RouteError as error:
            if error.status == httpx.codes.NOT_FOUND:
                return None
            raise
        version = answer.get("version") if isinstance(answer, dict) else None
        return version if isinstance(version, str) else None

    async def is_alive(self) -> bool:
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_SECONDS):
                return (await get(self._client, "health", max_bytes=ERROR_BYTES)).is_success
        except (httpx.HTTPError, InvalidBodyError, TimeoutError):
            return False

    async def _ask(self, verb: str, route: str, **details: Any) -> Response:
        request = self._client.build_request(verb, route, **details)
        try:
            async with asyncio.timeout(CONTROL_TIMEOUT_SECONDS):
                response = await send_request(self._client, request, max_bytes=MAX_CONTROL_BYTES)
        except InvalidBodyError as error:
            raise RouteError(httpx.codes.OK, f"/{route} {error}") from error
        except TimeoutError:
            raise httpx.ReadTimeout(f"no response in {CONTROL_TIMEOUT_SECONDS:g} s") from None
        if not response.is_success:
            raise RouteError(response.status, _error_message(response))
        return response


def _error_message(response: Response) -> str:
    """vLLM's error message, or the start of the response."""
    match response.json():
        case {"error": {"message": str(message)}} | {"error": str(message)}:
            return show_text(message)
    return show_text(response.text)
