"""McpTools: list and call the tools of one Fleet instance by JSON-RPC over HTTP.

It uses the episode's own connections, because the official client opens a transport per session,
which takes several times as long as a request on an open connection.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import httpx

from skyfleet.chat.message import ToolSpec
from skyfleet.envs.fleet.service import FleetService, InstanceEndedError, check_not_ended
from skyfleet.envs.fleet.tool_schema import shorten_parameters
from skyfleet.errors import EnvError

_PROTOCOL = "2025-06-18"
_RETRYABLE_STATUS = (429, 502, 503)
"""Answers of a gateway that, as a rule, did not reach the tool: any call is repeated, as
FleetTaskEnv does. A rare call that ran all the same runs twice; the alternative loses every one."""
_TRANSIENT_STATUS = (*_RETRYABLE_STATUS, 404, 408, 425, 500, 504)
"""A call that changes nothing is repeated after these too; 404: a new instance has no route yet."""
_POLL_SECONDS = 0.25
_TRIES = 3
"""One request may take this part of the deadline, so that one that hangs is repeated."""


class _RpcResponseError(EnvError):
    """The server answered the request with a JSON-RPC error."""


class McpTools:
    """The union of the endpoints' tools; the first endpoint that lists a name owns it."""

    def __init__(self, service: FleetService, urls: Sequence[str]) -> None:
        self._service, self._urls = service, tuple(urls)
        self._owners: dict[str, str] = {}
        self._read_only: set[str] = set()
        self._sessions: dict[str, dict[str, str]] = {}
        self._ids = count(1)

    async def list_tools(self) -> tuple[ToolSpec, ...]:
        """Return all tools as soon as there are any; a new instance may need some time.

        If an endpoint does not answer, it is asked once more before its tools are given up.
        """
        problems: dict[str, Exception] = {}
        found: tuple[ToolSpec, ...] = ()
        seconds = self._service.settings.tools_deadline_seconds
        try:
            async with asyncio.timeout(seconds):
                while True:
                    specs = await self._list_once(problems)
                    if specs and (found or not any(map(_may_recover, problems.values()))):
                        return specs
                    found = specs or found
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            if found:
                return found
            described = {url: _describe(error) for url, error in problems.items()}
            raise EnvError(f"no tools after {seconds:g} s: {described or self._urls}") from None

    async def call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tool's result; EnvError if its outcome cannot be known.

        A call that may have changed something is repeated only if it has not reached the tool.
        """
        seconds = self._service.settings.call_deadline_seconds
        params = {"name": name, "arguments": dict(arguments)}
        wait_seconds, problem = self._service.settings.first_wait_seconds, "it hangs"
        try:
            async with asyncio.timeout(seconds):
                while True:
                    try:
                        return await self._ask(
                            self._owners[name],
                            "tools/call",
                            params,
                            seconds=self._try_seconds(name),
                        )
                    except _RpcResponseError as error:
                        return {"content": [{"type": "text", "text": str(error)}], "isError": True}
                    except (httpx.HTTPStatusError, httpx.TransportError) as error:
                        if not _is_safe_to_retry(error, changes_nothing=name in self._read_only):
                            raise EnvError(f"tool {name}: {_describe(error)}") from error
                        problem = _describe(error)
                    await asyncio.sleep(wait_seconds)
                    wait_seconds *= 2
        except TimeoutError:
            raise EnvError(f"tool {name}: no answer after {seconds:g} s; {problem}") from None

    def _try_seconds(self, name: str) -> float:
        """A call that may change something gets the whole deadline, because it is not repeated."""
        seconds = self._service.settings.call_deadline_seconds
        return 2 * seconds / _TRIES if name in self._read_only else seconds

    async def _list_once(self, problems: dict[str, Exception]) -> tuple[ToolSpec, ...]:
        problems.clear()
        specs: dict[str, ToolSpec] = {}
        for url in self._urls:
            try:
                tools = await self._list_endpoint(url)
            except InstanceEndedError:
                raise
            except (httpx.HTTPError, EnvError) as error:
                self._sessions.pop(url, None)
                problems[url] = error
                continue
            for tool in tools:
                name = str(tool["name"])
                if name in specs:
                    continue
                specs[name], self._owners[name] = _parse_spec(tool), url
                if (tool.get("annotations") or {}).get("readOnlyHint"):
                    self._read_only.add(name)
        return tuple(specs.values())

    async def _list_endpoint(self, url: str) -> list[dict[str, Any]]:
        tools: list[dict[str, Any]] = []
        params: dict[str, Any] = {}
        seconds = self._service.settings.tools_deadline_seconds / _TRIES
        while True:
            page = await self._ask(url, "tools/list", params, seconds=seconds)
            tools += page.get("tools", [])
            if not page.get("nextCursor"):
                return tools
            params = {"cursor": page["nextCursor"]}

    async def _ask(
        self, url: str, method: str, params: Mapping[str, Any], *, seconds: float
    ) -> dict[str, Any]:
        if url not in self._sessions:
            await self._initialize(url, seconds)
        _, result = await self._request(url, method, params, seconds)
        return result

    async def _initialize(self, url: str, seconds: float) -> None:
        params = {
            "protocolVersion": _PROTOCOL,
            "capabilities": {},
            "clientInfo": {"name": "skyfleet", "version": "1"},
        }
        answer, result = await self._request(url, "initialize", params, seconds)
        headers = {"MCP-Protocol-Version": str(result.get("protocolVersion", _PROTOCOL))}
        if session := answer.headers.get("mcp-session-id"):
            headers["Mcp-Session-Id"] = session
        await self._post(url, {"method": "notifications/initialized"}, headers, seconds)
        self._sessions[url] = headers

    async def _request(
        self, url: str, method: str, params: Mapping[str, Any], seconds: float
    ) -> tuple[httpx.Response, dict[str, Any]]:
        message_id = next(self._ids)
        body = {"id": message_id, "method": method, "params": params}
        answer = await self._post(url, body, self._sessions.get(url, {}), seconds)
        reply = next((m for m in _parse_messages(answer) if m.get("id") == message_id), None)
        if reply is not None and isinstance(error := reply.get("error"), dict):
            raise _RpcResponseError(str(error.get("message")))
        if reply is None or not isinstance(reply.get("result"), dict):
            raise EnvError(f"{url}: {method} was answered with {answer.text[:200]!r}")
        return answer, reply["result"]

    async def _post(
        self, url: str, message: Mapping[str, Any], headers: Mapping[str, str], seconds: float
    ) -> httpx.Response:
        accepted = {"Accept": "application/json, text/event-stream"}
        answer = await self._service.send_to_instance(
            url,
            seconds=seconds,
            headers={**accepted, **headers},
            json={"jsonrpc": "2.0", **message},
        )
        return check_not_ended(answer).raise_for_status()


def _parse_messages(answer: httpx.Response) -> list[dict[str, Any]]:
    """Parse an answer, which is one JSON object or a stream of events that contains it."""
    texts = [answer.text]
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        texts = [line[5:] for line in answer.text.splitlines() if line.startswith("data:")]
    try:
        found = [json.loads(text) for text in texts]
    except ValueError:
        return []
    return [message for message in found if isinstance(message, dict)]


def _parse_spec(tool: Mapping[str, Any]) -> ToolSpec:
    return ToolSpec(
        name=str(tool["name"]),
        description=tool.get("description") or "",
        parameters=shorten_parameters(tool.get("inputSchema") or {}),
    )


def _is_safe_to_retry(error: httpx.HTTPError, *, changes_nothing: bool) -> bool:
    if isinstance(error, httpx.HTTPStatusError):
        statuses = _TRANSIENT_STATUS if changes_nothing else _RETRYABLE_STATUS
        return error.response.status_code in statuses
    has_not_run = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
    return changes_nothing or has_not_run


def _may_recover(error: Exception) -> bool:
    """Whether an endpoint exists and did not answer; one that does not exist answers with 404."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in _TRANSIENT_STATUS and error.response.status_code != 404
    return isinstance(error, httpx.TransportError)


def _describe(error: Exception) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        return f"{error.response.status_code} {error.response.text[:200]}"
    return str(error) or type(error).__name__
