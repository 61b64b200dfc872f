"""HTTP client for inference servers: retries with backoff, deadlines, bounded bodies, typed errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from random import uniform
from ssl import SSLContext
from time import monotonic
from types import TracebackType
from typing import Any, Self

import httpx

from skyfleet.engines.engine_downtime import (
    AnswerTimes,
    deferring_expiry,
    expire_deferred,
    record_engine_downtime,
)
from skyfleet.engines.post_request import PostRequest
from skyfleet.engines.response_body import (
    InvalidBodyError,
    Response,
    completion_bytes,
    send_request,
    show_text,
)
from skyfleet.errors import ContextFullError, EngineError

MAX_ATTEMPTS = 4
INITIAL_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 15.0
MAX_RETRY_AFTER_SECONDS = 60.0
"""A server that asks for a longer pause is asked again after this one."""
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
_CONNECTION_ERRORS = (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL, OSError)
_READ_LOG = "read the server's log"
_CHECK_SERVER = "check that the url is an OpenAI-compatible server, and read its log"


class RequestRejectedError(EngineError):
    """The server rejected this one request (HTTP 4xx); other requests may succeed."""


class UnsupportedParameterError(RequestRejectedError):
    """The model does not support `param`, or not with this value."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(RequestRejectedError, ContextFullError):
    """The conversation exceeds the context length of the server."""

    is_by_server = True


def auth_header(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


@cache
def _ssl_context() -> SSLContext:
    """One for all clients: reading the certificates takes longer than many requests."""
    return httpx.create_ssl_context()


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
        self._times = AnswerTimes()
        self._running: set[PostRequest] = set()
        self._lost_seconds = 0.0
        """Of all requests that ended."""
        # Without compression, so that the size of a body is known while it is read.
        self._headers = {"Accept-Encoding": "identity", **headers}
        self._ssl = _ssl_context()
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
        """Post `body` and return the JSON object of the response; EngineError if there is none.

        Failed attempts, the pauses between them and an unanswered request count as engine loss of
        the current episode.
        """
        request = PostRequest(body, headers or {})
        await self._wait_for_connection()
        self._running.add(request)
        try:
            with (
                request.lateness,
                deferring_expiry(lambda: request.seconds_until_unanswered(self._times)),
            ):
                answer = await self._post_in_time(request)
            await expire_deferred()
            return answer
        except asyncio.CancelledError:
            # Usually an episode's time limit: was the server slow, or does it not answer?
            request.lost_seconds = request.measure_loss(self._times)
            raise
        except RequestRejectedError:
            raise
        except EngineError:
            request.end_phase()
            raise
        finally:
            self._semaphore.release()
            self._running.discard(request)
            self._lost_seconds += request.lost_seconds
            record_engine_downtime(request.lost_seconds, self._describe_loss(request))

    async def _wait_for_connection(self) -> None:
        """Waiting for others is no loss, unless the others wait for a failing server."""
        if not self._semaphore.locked():
            await self._semaphore.acquire()
            return
        started, lost_before = monotonic(), self._lost_seconds
        try:
            with deferring_expiry(self._seconds_until_unanswered):
                await self._semaphore.acquire()
        finally:
            lost = self._lost_seconds - lost_before
            lost += sum(request.measure_loss(self._times) for request in self._running)
            record_engine_downtime(min(monotonic() - started, lost), f"{self._url} fails or hangs")
        try:
            await expire_deferred()
        except asyncio.CancelledError:
            self._semaphore.release()
            raise

    def _seconds_until_unanswered(self) -> float:
        """Of the request that may take longest."""
        left = (request.seconds_until_unanswered(self._times) for request in self._running)
        return max(left, default=0.0)

    def _describe_loss(self, request: PostRequest) -> str:
        """Of the last attempt, for the error of an episode that runs out of time."""
        problem = f"failed with {request.problem}" if request.problem else "did not answer"
        return f"{self._url} {problem}"

    async def _post_in_time(self, request: PostRequest) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._timeout_seconds) as deadline:
                return await self._post_with_retries(request)
        except TimeoutError:
            if not deadline.expired():
                raise
        last = f", last with {request.problem}" if request.problem else ""
        raise EngineError(
            f"{self._url} did not respond within {self._timeout_seconds:g} s{last}; {_READ_LOG}"
        )

    async def _post_with_retries(self, request: PostRequest) -> dict[str, Any]:
        backoff = INITIAL_BACKOFF_SECONDS
        for attempt in range(1, self._max_attempts + 1):
            retry_after = 0.0
            try:
                response = await self._send(request)
            except _CONNECTION_ERRORS as error:
                request.problem = f"{type(error).__name__}: {show_text(str(error))}"
            else:
                if response.status not in _TRANSIENT_STATUSES:
                    answer = self._parse(response)
                    request.end_answered(self._times)
                    return answer
                request.problem = response.shown
                retry_after = _retry_after_seconds(response)
            request.end_phase()
            if attempt < self._max_attempts:
                # Jitter, so that requests that failed together do not return together.
                await asyncio.sleep(max(uniform(backoff / 2, backoff), retry_after))
                request.end_phase()
                backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)
        raise EngineError(
            f"{self._url} failed {self._max_attempts} times, last with {request.problem}; {_READ_LOG}"
        )

    async def _send(self, request: PostRequest) -> Response:
        request.begin_attempt()
        async with self.connection() as client:
            try:
                return await send_request(
                    client,
                    client.build_request(
                        "POST", self._url, content=request.content, headers=request.headers
                    ),
                    max_bytes=completion_bytes(request.max_tokens, len(request.content)),
                    progress=request.progress,
                )
            except InvalidBodyError as error:
                raise EngineError(f"{self._url} {error}; {_CHECK_SERVER}") from error

    def _parse(self, response: Response) -> dict[str, Any]:
        if 300 <= response.status < 400:
            location = show_text(response.headers.get("location", ""))
            raise EngineError(
                f"{self._url} redirects to {location!r}, which is not followed; use the server's "
                "own url"
            )
        if not response.is_success:
            raise _client_error(response, f"{self._url} rejected the request with {response.shown}")
        answer = response.json()
        if not isinstance(answer, dict):
            raise EngineError(
                f"{self._url} did not return a JSON object but {response.shown}; {_CHECK_SERVER}"
            )
        return answer


def _client_error(response: Response, problem: str) -> EngineError:
    is_client_error = 400 <= response.status < 500
    if not is_client_error or response.status in _GENERAL_STATUSES:
        return EngineError(problem)
    if any(phrase in response.text for phrase in _CONTEXT_LENGTH_PHRASES):
        return ContextLengthError(problem)
    match response.json():
        case {
            "error": {
                "code": "unsupported_parameter" | "unsupported_value",
                "param": str() as param,
            }
        }:
            return UnsupportedParameterError(problem, param)
    return RequestRejectedError(problem)


def _retry_after_seconds(response: Response) -> float:
    """The pause that the server asks for, in seconds or as a date; 0 without one."""
    value = response.headers.get("retry-after", "").strip()
    if value.isdecimal():
        return min(float(value), MAX_RETRY_AFTER_SECONDS)
    try:
        at = parsedate_to_datetime(value)
    except (ValueError, TypeError, OverflowError):
        return 0.0
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    seconds = (at - datetime.now(UTC)).total_seconds()
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_SECONDS)
