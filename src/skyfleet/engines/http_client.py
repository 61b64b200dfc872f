"""HTTP client with retries, deadlines and typed errors for inference servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

import httpx

from skyfleet.chat.tool_calls.strict_json import UNREADABLE
from skyfleet.errors import ContextFullError, EngineError

TRIES = 4
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 15.0
CONNECT_SECONDS = 10.0

_A_POOL = 16
"""Connections: httpx looks through a whole pool for every request, a hundred of them for long."""
_PASSING = frozenset({408, 409, 429, 500, 502, 503, 504, 529})
_TO_ALL = frozenset({401, 402, 403, 404, 405, 407})
"""Refusals that every request would meet: key, credit, address."""
_TOO_LONG = ("context_length_exceeded", "maximum context length", "prompt is too long")
"""How OpenAI, vLLM, Anthropic and we say it."""
_SHOWN_CHARACTERS = 300


class RefusedError(EngineError):
    """The endpoint has no answer to this one request, such as a conversation too long for it."""


class UnsupportedError(RefusedError):
    """The model does not take `param`, or not with this value."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class TooLongError(RefusedError, ContextFullError):
    """This conversation is too long for the endpoint."""


def bearer(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


class Endpoint:
    """Kept-alive connections to one address; `async with` closes them."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        *,
        timeout_seconds: float,
        max_concurrent: int = 100,
        tries: int = TRIES,
    ) -> None:
        """`timeout_seconds` covers one post with all its tries, not the wait for its turn.

        At most `max_concurrent` posts are under way, each on a connection of its own.
        """
        self._url, self._timeout_seconds, self._tries = url, timeout_seconds, tries
        self._gate = asyncio.Semaphore(max_concurrent)
        self._headers = dict(headers)
        self._ssl = httpx.create_ssl_context()
        self._pools: list[httpx.AsyncClient] = []
        self._free: list[httpx.AsyncClient] = []
        """A pool once for each of its connections that nobody uses."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pool in self._pools:
            await pool.aclose()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[httpx.AsyncClient]:
        """One of a pool that has one free, the last used first; another pool only if none has."""
        if not self._free:
            self._pools.append(self._new_pool())
            self._free += [self._pools[-1]] * _A_POOL
        pool = self._free.pop()
        try:
            yield pool
        finally:
            self._free.append(pool)

    def _new_pool(self) -> httpx.AsyncClient:
        seconds = self._timeout_seconds
        return httpx.AsyncClient(
            headers=self._headers,
            verify=self._ssl,
            timeout=httpx.Timeout(seconds, connect=min(CONNECT_SECONDS, seconds)),
            limits=httpx.Limits(max_connections=_A_POOL, max_keepalive_connections=_A_POOL),
        )

    async def post(
        self, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        async with self._gate:
            try:
                async with asyncio.timeout(self._timeout_seconds) as deadline:
                    return await self._tried(body, headers or {})
            except TimeoutError:
                if not deadline.expired():
                    raise
        raise EngineError(f"{self._url} gave no answer within {self._timeout_seconds:g} s")

    async def _tried(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
        pause = FIRST_PAUSE_SECONDS
        for attempt in range(1, self._tries + 1):
            asked_seconds = 0.0
            try:
                async with self.connection() as client:
                    response = await client.post(self._url, json=body, headers=headers)
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                problem = f"{response.status_code}: {response.text[:_SHOWN_CHARACTERS]}"
                if response.status_code not in _PASSING:
                    return self._read(response, problem)
                asked_seconds = _asked_pause(response)
            if attempt < self._tries:
                await asyncio.sleep(max(pause, asked_seconds))
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        raise EngineError(f"{self._url} failed {self._tries} times, last with {problem}")

    def _read(self, response: httpx.Response, problem: str) -> dict[str, Any]:
        if response.is_error:
            raise _refusal(response, f"{self._url} refused with {problem}")
        answer = _json(response)
        if not isinstance(answer, dict):
            raise EngineError(f"{self._url} answered no JSON object but {problem}")
        return answer


def _refusal(response: httpx.Response, problem: str) -> EngineError:
    if not response.is_client_error or response.status_code in _TO_ALL:
        return EngineError(problem)
    if any(words in response.text for words in _TOO_LONG):
        return TooLongError(problem)
    match _json(response):
        case {
            "error": {
                "code": "unsupported_parameter" | "unsupported_value",
                "param": str() as param,
            }
        }:
            return UnsupportedError(problem, param)
    return RefusedError(problem)


def _json(response: httpx.Response) -> Any:
    """None where it is none."""
    try:
        return response.json()
    except UNREADABLE:
        return None


def _asked_pause(response: httpx.Response) -> float:
    """The seconds a busy endpoint asks for; a date it names instead is not read."""
    asked = response.headers.get("retry-after", "")
    return float(asked) if asked.isdecimal() else 0.0
