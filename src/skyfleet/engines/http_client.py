"""HTTP client for inference servers: retries with backoff, deadlines, typed errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

import httpx

from skyfleet.chat.tool_calls.strict_json import PARSE_ERRORS
from skyfleet.errors import ContextFullError, EngineError

MAX_ATTEMPTS = 4
INITIAL_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 15.0
CONNECT_SECONDS = 10.0

_POOL_SIZE = 16
"""Connections per httpx pool: httpx scans a whole pool for every request, which is slow for
hundreds."""
_TRANSIENT_STATUSES = frozenset({408, 409, 429, 500, 502, 503, 504, 529})
_GENERAL_STATUSES = frozenset({401, 402, 403, 404, 405, 407})
"""Client errors that every request would get: wrong key, no credit, wrong address."""
_CONTEXT_LENGTH_PHRASES = (
    "context_length_exceeded",
    "maximum context length",
    "prompt is too long",
)
"""From OpenAI, vLLM, Anthropic and our own server."""
_SHOWN_CHARACTERS = 300


class RequestRejectedError(EngineError):
    """The server rejected this one request (HTTP 4xx); other requests may succeed."""


class UnsupportedParameterError(RequestRejectedError):
    """The model does not support `param`, or not with this value."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(RequestRejectedError, ContextFullError):
    """The conversation exceeds the context length of the server."""


def auth_header(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


class RetryingClient:
    """Posts JSON to one URL over kept-alive connections; `async with` closes them."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        *,
        timeout_seconds: float,
        max_concurrent: int = 100,
        tries: int = MAX_ATTEMPTS,
    ) -> None:
        """`timeout_seconds` covers one post with all its retries, but not its wait for a free
        connection.

        At most `max_concurrent` posts run at once, each on its own connection.
        """
        self._url, self._timeout_seconds, self._max_attempts = url, timeout_seconds, tries
        self._semaphore = asyncio.Semaphore(max_concurrent)
        self._headers = dict(headers)
        self._ssl = httpx.create_ssl_context()
        self._pools: list[httpx.AsyncClient] = []
        self._free: list[httpx.AsyncClient] = []
        """Each pool once per connection that is free."""

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
        """Borrow a connection, most recently used pool first.

        Open a new pool only if all are busy.
        """
        if not self._free:
            self._pools.append(self._new_pool())
            self._free += [self._pools[-1]] * _POOL_SIZE
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
            limits=httpx.Limits(max_connections=_POOL_SIZE, max_keepalive_connections=_POOL_SIZE),
        )

    async def post(
        self, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Post `body` and return the JSON object of the response; EngineError if there is none."""
        async with self._semaphore:
            try:
                async with asyncio.timeout(self._timeout_seconds) as deadline:
                    return await self._post_with_retries(body, headers or {})
            except TimeoutError:
                if not deadline.expired():
                    raise
        raise EngineError(f"{self._url} did not respond within {self._timeout_seconds:g} s")

    async def _post_with_retries(
        self, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> dict[str, Any]:
        backoff = INITIAL_BACKOFF_SECONDS
        for attempt in range(1, self._max_attempts + 1):
            retry_after = 0.0
            try:
                async with self.connection() as client:
                    response = await client.post(self._url, json=body, headers=headers)
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                problem = f"{response.status_code}: {response.text[:_SHOWN_CHARACTERS]}"
                if response.status_code not in _TRANSIENT_STATUSES:
                    return self._parse(response, problem)
                retry_after = _retry_after_seconds(response)
            if attempt < self._max_attempts:
                await asyncio.sleep(max(backoff, retry_after))
                backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)
        raise EngineError(f"{self._url} failed {self._max_attempts} times, last with {problem}")

    def _parse(self, response: httpx.Response, problem: str) -> dict[str, Any]:
        if response.is_error:
            raise _client_error(response, f"{self._url} rejected the request with {problem}")
        answer = _json(response)
        if not isinstance(answer, dict):
            raise EngineError(f"{self._url} did not return a JSON object but {problem}")
        return answer


def _client_error(response: httpx.Response, problem: str) -> EngineError:
    if not response.is_client_error or response.status_code in _GENERAL_STATUSES:
        return EngineError(problem)
    if any(phrase in response.text for phrase in _CONTEXT_LENGTH_PHRASES):
        return ContextLengthError(problem)
    match _json(response):
        case {
            "error": {
                "code": "unsupported_parameter" | "unsupported_value",
                "param": str() as param,
            }
        }:
            return UnsupportedParameterError(problem, param)
    return RequestRejectedError(problem)


def _json(response: httpx.Response) -> Any:
    """None if the body is not JSON."""
    try:
        return response.json()
    except PARSE_ERRORS:
        return None


def _retry_after_seconds(response: httpx.Response) -> float:
    """Seconds of the Retry-After header; dates are ignored."""
    value = response.headers.get("retry-after", "")
    return float(value) if value.isdecimal() else 0.0
