"""VllmRoutes: calls of vLLM's AsyncLLM over HTTP, by routes that its developer mode opens.

They are the same in 0.23 and 0.32. What they answer is read only where it says something.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Self

import httpx

from skyfleet.engines.posting import CONNECT_SECONDS, bearer

STEERING_SECONDS = 900.0
"""For one call: a large model's weights may come from a slow disk."""

HEALTH_SECONDS = 10.0
_SHOWN_CHARACTERS = 300


class RouteError(Exception):
    """A route answered that it failed, or that there is none."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"{status}: {said}")
        self.status = status


class VllmRoutes:
    """`async with` closes its connections."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        """`url` ends where /v1 begins: http://localhost:8000."""
        self.url = url
        self._client = httpx.AsyncClient(
            base_url=url,
            headers=bearer(api_key),
            timeout=httpx.Timeout(STEERING_SECONDS, connect=CONNECT_SECONDS),
            # Minutes lie between two calls, and a connection that the server has closed fails.
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def sleep(self, *, level: int, mode: str) -> None:
        await self._ask("POST", "sleep", params={"level": level, "mode": mode})

    async def wake_up(self, tags: Sequence[str] = ()) -> None:
        """Without tags all of its memory, and its scheduler."""
        await self._ask("POST", "wake_up", params={"tags": list(tags)})

    async def is_sleeping(self) -> bool:
        """Or only paused."""
        answer = (await self._ask("GET", "is_sleeping")).json()
        return bool(answer["is_sleeping"])

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        await self._ask("POST", "pause", params={"mode": mode, "clear_cache": clear_cache})

    async def resume_generation(self) -> None:
        await self._ask("POST", "resume")

    async def reset_prefix_cache(self) -> None:
        """Not done while a turn runs, which 0.32 tells; what stays has its version in its keys."""
        await self._ask("POST", "reset_prefix_cache")

    async def collective_rpc(self, method: str, args: Sequence[Any] = ()) -> list[Any]:
        """None, mappings and lists come back as they are, all else as words."""
        body = {"method": method, "args": list(args)}
        answer = (await self._ask("POST", "collective_rpc", json=body)).json()
        results: list[Any] = answer["results"]
        return results

    async def data_parallel_size(self) -> int:
        """A worker of a dense model does not know it: its engine is told that it is alone."""
        answer = await self._ask("GET", "server_info")
        found = re.search(r"\bdata_parallel_size=(\d+)", answer.text)
        if found is None:
            raise RouteError(answer.status_code, "/server_info names no data_parallel_size")
        return int(found[1])

    async def version(self) -> str | None:
        """None for a server that is not vLLM."""
        try:
            answer = (await self._ask("GET", "version")).json()
        except ValueError:
            return None
        except RouteError as error:
            if error.status == httpx.codes.NOT_FOUND:
                return None
            raise
        version = answer.get("version") if isinstance(answer, dict) else None
        return version if isinstance(version, str) else None

    async def is_alive(self) -> bool:
        try:
            return (await self._client.get("health", timeout=HEALTH_SECONDS)).is_success
        except httpx.HTTPError:
            return False

    async def _ask(self, verb: str, route: str, **details: Any) -> httpx.Response:
        response = await self._client.request(verb, route, **details)
        if response.is_error:
            raise RouteError(response.status_code, _said(response))
        return response


def _said(response: httpx.Response) -> str:
    """vLLM's message, or the answer's beginning."""
    try:
        match response.json():
            case {"error": {"message": str(message)}} | {"error": str(message)}:
                return message[:_SHOWN_CHARACTERS]
    except ValueError:
        pass
    return response.text[:_SHOWN_CHARACTERS]
