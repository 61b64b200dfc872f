"""Read HTTP responses of servers that are not trusted: bounded in size, compressed or not."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol

import httpx

from skyfleet.chat.tool_calls.strict_json import PARSE_ERRORS

BASE_BYTES = 1 << 20
BYTES_PER_TOKEN = 1024
"""A sampled token with its text, bytes and logprob takes 100 to 300."""
BYTES_PER_REQUEST_BYTE = 16
"""A server may return the prompt as token ids: at most one per byte of the request."""
ERROR_BYTES = 1 << 16
"""More is not read from a response with an error status."""
_SHOWN_CHARACTERS = 300
_WHITESPACE = b" \t\r\n"
_ZLIB_OR_GZIP = zlib.MAX_WBITS | 32
_MAX_COOKIES = 32


class InvalidBodyError(Exception):
    """The body is too large or cannot be decompressed; the message completes `URL ...`."""


@dataclass(slots=True)
class Progress:
    """How far a response has come."""

    first_byte_at: float | None = None
    """When the body began, without leading whitespace, which some servers send to keep a
    connection open while they generate."""
    n_bytes: int = 0
    """Of the body so far."""
    now: Callable[[], float] = monotonic


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    status: int
    headers: httpx.Headers
    body: bytes

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")

    @property
    def shown(self) -> str:
        """The status and the start of the body in one line, for error messages."""
        start = self.body[: 4 * _SHOWN_CHARACTERS].decode(errors="replace")
        return f"{self.status}: {show_text(start)}"

    def json(self) -> Any:
        """None if the body is not JSON."""
        try:
            return json.loads(self.body)
        except PARSE_ERRORS:
            return None


def show_text(text: str) -> str:
    """The start of what a server sent, in one printable line."""
    start = text[: 4 * _SHOWN_CHARACTERS]
    printable = "".join(char if char.isprintable() else " " for char in start)
    return " ".join(printable.split())[:_SHOWN_CHARACTERS]


def completion_bytes(max_tokens: int, request_bytes: int) -> int:
    """The size limit of a response with at most `max_tokens` sampled tokens."""
    return BASE_BYTES + BYTES_PER_TOKEN * max_tokens + BYTES_PER_REQUEST_BYTE * request_bytes


async def send_request(
    client: httpx.AsyncClient,
    request: httpx.Request,
    *,
    max_bytes: int,
    progress: Progress | None = None,
) -> Response:
    """Send `request` and read at most `max_bytes` of the body, after decompression.

    InvalidBodyError for a larger one. The body of an error is cut at `ERROR_BYTES` instead.
    """
    received = await client.send(request, stream=True)
    try:
        if received.is_success:
            body = await _read_body(received, max_bytes, progress or Progress())
        else:
            body = await _read_start(received)
    finally:
        await received.aclose()
        if len(client.cookies) > _MAX_COOKIES:
            client.cookies.clear()
    return Response(status=received.status_code, headers=received.headers, body=body)


async def get(client: httpx.AsyncClient, url: str | httpx.URL, *, max_bytes: int) -> Response:
    return await send_request(client, client.build_request("GET", url), max_bytes=max_bytes)


async def _read_body(response: httpx.Response, max_bytes: int, progress: Progress) -> bytes:
    decoder = _make_decoder(response.headers.get("content-encoding", "identity"))
    parts: list[bytes] = []
    n_bytes = 0
    # Not httpx's own decoder: it decompresses a whole chunk, which a bomb makes a thousand times
    # larger.
    async for chunk in response.aiter_raw():
        part = decoder.decompress(chunk, max_bytes - n_bytes + 1)
        if progress.first_byte_at is None and part.strip(_WHITESPACE):
            progress.first_byte_at = progress.now()
        progress.n_bytes = n_bytes = n_bytes + len(part)
        if n_bytes > max_bytes:
            raise InvalidBodyError(f"sent more than {max_bytes:,} bytes")
        parts.append(part)
    if not decoder.eof:
        raise InvalidBodyError("sent a body that cannot be decompressed: it is truncated")
    return b"".join(parts)


async def _read_start(response: httpx.Response) -> bytes:
    try:
        decoder = _make_decoder(response.headers.get("content-encoding", "identity"))
        start = b""
        async for chunk in response.aiter_raw():
            start += decoder.decompress(chunk, ERROR_BYTES - len(start) + 1)
            if len(start) > ERROR_BYTES:
                break
    except InvalidBodyError:
        return b""  # the status says enough
    return start[:ERROR_BYTES]


class _Decoder(Protocol):
    @property
    def eof(self) -> bool: ...

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        """At most `max_length` bytes."""
        ...


class _Identity:
    eof = True

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return data


class _Zlib:
    def __init__(self) -> None:
        self._decoder = zlib.decompressobj(_ZLIB_OR_GZIP)

    @property
    def eof(self) -> bool:
        return self._decoder.eof

    def decompress(self, data: bytes, max_length: int) -> bytes:
        try:
            return self._decoder.decompress(data, max_length)
        except zlib.error as error:
            raise InvalidBodyError(f"sent a body that cannot be decompressed: {error}") from error


def _make_decoder(encoding: str) -> _Decoder:
    """For servers that compress although the request forbids it."""
    match encoding.strip().lower():
        case "identity" | "":
            return _Identity()
        case "gzip" | "x-gzip" | "deflate":
            return _Zlib()
    raise InvalidBodyError(
        f"sent a body with Content-Encoding {show_text(encoding)!r}, although the request accepts "
        "identity only"
    )
