"""Post JSON to a model's endpoint, again after what passes by itself; EngineError after that.

RefusedError where only this request is refused: the endpoint may well take the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import httpx

from skyfleet.errors import EngineError

TRIES = 4
FIRST_PAUSE_SECONDS = 0.5

_PASSING = frozenset({408, 409, 429, 500, 502, 503, 504, 529})
_TO_ALL = frozenset({401, 402, 403, 404, 405, 407})
"""Refusals that every request would meet: key, credit, address."""
_SHOWN_CHARACTERS = 300


class RefusedError(EngineError):
    """The endpoint has no answer to this one request, such as a conversation too long for it."""


class Endpoint:
    """One keep-alive client; `async with` closes it."""

    def __init__(self, url: str, headers: Mapping[str, str], *, timeout_seconds: float) -> None:
        self._url = url
        self._client = httpx.AsyncClient(headers=dict(headers), timeout=timeout_seconds)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._client.aclose()

    async def post(self, body: Mapping[str, Any]) -> dict[str, Any]:
        pause = FIRST_PAUSE_SECONDS
        for attempt in range(1, TRIES + 1):
            try:
                response = await self._client.post(self._url, json=body)
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                problem = f"{response.status_code}: {response.text[:_SHOWN_CHARACTERS]}"
                if response.status_code not in _PASSING:
                    return self._read(response, problem)
            if attempt < TRIES:
                await asyncio.sleep(pause)
                pause *= 2
        raise EngineError(f"{self._url} failed {TRIES} times, last with {problem}")

    def _read(self, response: httpx.Response, problem: str) -> dict[str, Any]:
        if response.is_error:
            alone = response.is_client_error and response.status_code not in _TO_ALL
            kind = RefusedError if alone else EngineError
            raise kind(f"{self._url} refused with {problem}")
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise EngineError(f"{self._url} answered no JSON object but {problem}")
        return answer
