"""The catalogue of broken servers: what each sends, and how an episode that meets it ends."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tests.fakes.broken_http import Behaviour, Connection, HttpRequest, good_answer

Client = Literal["tokens", "chat", "messages", "anthropic"]
"""OpenAIEngine, OpenAIChatEngine, OpenAIChat, AnthropicChat."""
ALL: tuple[Client, ...] = ("tokens", "chat", "messages", "anthropic")
WITH_TOKENS: tuple[Client, ...] = ("tokens", "chat")

FAILED = "failed \\d+ times, last with"
NO_JSON = "did not return a JSON object"
INVALID = "returned an invalid completion"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    name: str
    behave: Behaviour
    ends: Literal["ungraded", "graded", "stops"] = "ungraded"
    """`stops`: every request would be answered like this, so one sentence stops the run."""
    sentence: str = FAILED
    """A part of the error if the episode has time for all retries; a regular expression."""
    accepts: bool = True
    clients: tuple[Client, ...] = ALL
    is_slow: bool = False
    """It answers nothing, so an episode takes its whole time limit."""


KINDS: dict[str, Kind] = {}


def add(name: str, behave: Behaviour, **more: Any) -> None:
    assert name not in KINDS
    KINDS[name] = Kind(name=name, behave=behave, **more)


# Behaviours


def responding(
    body: bytes, status: int = 200, headers: Mapping[str, str] | None = None
) -> Behaviour:
    async def behave(request: HttpRequest, connection: Connection) -> bool:
        await connection.respond(body, status, headers)
        return True

    return behave


def sending(*parts: bytes, then: Literal["close", "reset", "hang"] = "close") -> Behaviour:
    """Raw bytes. GOOD stands for the good answer, HALF for its first half."""

    async def behave(request: HttpRequest, connection: Connection) -> None:
        good = json.dumps(good_answer(request)).encode() if request.path else b""
        for part in parts:
            whole = part.replace(b"GOOD", good).replace(b"HALF", good[: len(good) // 2])
            await connection.send(whole.replace(b"LENGTH", b"%d" % len(good)))
        if then == "hang":
            await connection.hang()
        elif then == "reset":
            await asyncio.sleep(0.01)
            connection.reset()

    return behave


def changing(change: Callable[[dict[str, Any]], object]) -> Behaviour:
    """The good answer with a change: `change` edits it, or returns another."""

    async def behave(request: HttpRequest, connection: Connection) -> bool:
        answer = good_answer(request)
        changed = change(answer)
        await connection.respond(json.dumps(answer if changed is None else changed).encode())
        return True

    return behave


def setting(*path: str | int, to: object) -> Behaviour:
    def change(answer: Any) -> None:
        for key in path[:-1]:
            answer = answer[key]
        answer[path[-1]] = to(answer.get(path[-1])) if callable(to) else to

    return changing(change)


def repeating(head: bytes, part: bytes, *, seconds: float = 0.0) -> Behaviour:
    """Endless: the head, then the part again and again."""

    async def behave(request: HttpRequest, connection: Connection) -> None:
        await connection.send(head)
        while True:
            await connection.send(part)
            await asyncio.sleep(seconds)

    return behave


async def send_cookie(request: HttpRequest, connection: Connection) -> bool:
    cookie = f"c{request.number}={'x' * 4000}"
    await connection.respond(b"no", 503, {"Set-Cookie": cookie})
    return True


async def answer_well(request: HttpRequest, connection: Connection) -> bool:
    await connection.respond(json.dumps(good_answer(request)).encode())
    return True


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
LENGTH = HEAD + b"Content-Length: LENGTH\r\n\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
GZIP = {"Content-Encoding": "gzip"}
BOMB = gzip.compress(b" " * (1 << 24), 1)
"""16 MiB in 70 KiB."""
HTML = b"<html><body><h1>502 Bad Gateway</h1></body></html>"


# Error statuses

for code in (408, 409, 500, 502, 503, 504, 529):
    add(f"status {code}", responding(b"overloaded", code), sentence=f"{FAILED} {code}")
add("status 429", responding(b"slow down", 429, {"Retry-After": "1"}), sentence="429: slow down")
add("429, retry in an hour", responding(b"", 429, {"Retry-After": "3600"}), sentence="429")
add("429, retry in 2999", responding(b"", 429, {"Retry-After": "Thu, 01 Jan 2999 00:00:00 GMT"}))
add("500 as an HTML page", responding(HTML * 1000, 500, {"Content-Type": "text/html"}))
add(
    "500 with an endless body",
    repeating(
        b"HTTP/1.1 500 No\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"4000\r\n" + b"x" * 16384 + b"\r\n",
    ),
    sentence=f"{FAILED} 500: xxx",
)
add("status 401", responding(b"no", 401), sentence="rejected the request with 401")
add("status 404", responding(b"no", 404), sentence="rejected the request with 404")
add("status 400", responding(b"no", 400), sentence="rejected the request with 400")
add("status 413", responding(b"no", 413), sentence="rejected the request with 413")
add("status 204", sending(b"HTTP/1.1 204 No\r\n\r\n"), sentence=NO_JSON)
add("status 999", responding(b"{}", 999), sentence="rejected the request with 999")
add(
    "a redirect",
    responding(b"", 307, {"Location": "http://127.0.0.1:9/v1"}),
    sentence="redirects to",
)
add("a redirect to itself", responding(b"", 308, {"Location": ""}), sentence="redirects to")
add(
    "a redirect to no URL",
    responding(b"", 302, {"Location": "http://[:1"}),
    sentence="redirects to",
)
add(
    "context full, although it is not",
    responding(b'{"error": "maximum context length is 4096 tokens"}', 400),
    sentence="too long",
)

# Connections

add("reset before the answer", sending(then="reset"))
add("closed before the answer", sending())
add("reset at connecting", sending(then="reset"), accepts=False)
add("closed inside the headers", sending(b"HTTP/1.1 200 OK\r\nContent-Le"))
add("reset inside the body", sending(LENGTH + b"HALF", then="reset"))
add("truncated body", sending(LENGTH + b"HALF"))
add("closed inside a chunk", sending(CHUNKED + b"40\r\nabc"))
add("a wrong chunk length", sending(CHUNKED + b"zz\r\nabc\r\n"))
add(
    "hangs at connecting",
    sending(then="hang"),
    accepts=False,
    is_slow=True,
    sentence="did not respond",
)
add("hangs before the headers", sending(then="hang"), is_slow=True, sentence="did not respond")
add(
    "hangs after the headers",
    sending(LENGTH, then="hang"),
    is_slow=True,
    sentence="did not respond",
)
add(
    "hangs inside the body",
    sending(LENGTH + b"HALF", then="hang"),
    is_slow=True,
    sentence="did not respond",
)
add(
    "drips headers",
    repeating(HEAD + b"X-A: ", b"a", seconds=0.02),
    is_slow=True,
    sentence="did not respond",
)
add(
    "drips the body",
    repeating(HEAD + b'Content-Length: 100000\r\n\r\n{"', b"a", seconds=0.02),
    is_slow=True,
    sentence="did not respond",
)
add(
    "drips whitespace",
    repeating(HEAD + b"Content-Length: 100000\r\n\r\n", b" ", seconds=0.02),
    is_slow=True,
    sentence="did not respond",
)
add("TLS on a plain port", sending(b"\x15\x03\x01\x00\x02\x02\x28"), accepts=False)
add("noise", sending(bytes(range(256)) * 8))
add("HTTP 0.9", sending(b"GOOD"))
add("an SSH banner", sending(b"SSH-2.0-OpenSSH_9.6\r\n"), accepts=False)
add("endless headers", repeating(HEAD, b"X-A: b\r\n" * 1000))
add("a header of 1 MB", sending(HEAD + b"X-A: " + b"a" * (1 << 20) + b"\r\n\r\n"))
add(
    "endless 103 Early Hints",
    repeating(b"", b"HTTP/1.1 103 Early\r\n\r\n"),
    is_slow=True,
    sentence="did not respond",
)
add("two content lengths", sending(HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nGOOD"))
add("a negative content length", sending(HEAD + b"Content-Length: -1\r\n\r\nGOOD"))
add(
    "a content length that is too short",
    sending(HEAD + b"Content-Length: 9\r\n\r\nGOOD"),
    sentence=NO_JSON,
)
add("an unknown transfer encoding", sending(HEAD + b"Transfer-Encoding: zip\r\n\r\nGOOD"))
add("cookies without end", send_cookie)

# Bodies that are no JSON object

ENDLESS = b"8000\r\n" + b" " * 32768 + b"\r\n"
add("an endless body", repeating(CHUNKED + b"1\r\n{\r\n", ENDLESS), sentence="sent more than")
add(
    "an endless string",
    repeating(CHUNKED + b'2\r\n{"\r\n', b"8000\r\n" + b"a" * 32768 + b"\r\n"),
    sentence="sent more than",
)
add(
    "a body of 64 MiB",
    sending(HEAD + b"Content-Length: 67108864\r\n\r\n[", *[b"0," * (1 << 15)] * 1024),
    sentence="sent more than",
)
add("a gzip bomb", responding(BOMB, 200, GZIP), sentence="sent more than")
add(
    "damaged gzip",
    responding(b"\x1f\x8b\x08" + b"\xff" * 60, 200, GZIP),
    sentence="cannot be decompressed",
)
add(
    "truncated gzip",
    responding(gzip.compress(b'{"choices": []}' * 99)[:-20], 200, GZIP),
    sentence="cannot be decompressed",
)
add(
    "gzip that is none",
    responding(b'{"choices": []}', 200, GZIP),
    sentence="cannot be decompressed",
)
add(
    "an unknown encoding",
    responding(b"abc", 200, {"Content-Encoding": "zstd, br"}),
    sentence="Content-Encoding",
)
add("an HTML page with 200", responding(HTML, 200, {"Content-Type": "text/html"}), sentence=NO_JSON)
add("an empty body", responding(b""), sentence=NO_JSON)
add("half a JSON object", responding(b'{"choices": [{"index'), sentence=NO_JSON)
add("a JSON list", responding(b"[1, 2]"), sentence=NO_JSON)
add("null", responding(b"null"), sentence=NO_JSON)
add("invalid UTF-8", responding(b'{"choices": "\xff\xfe\x80"}'), sentence=NO_JSON)
add("deep JSON", responding(b'{"a":' * 50_000), sentence=NO_JSON)
add("an integer of 100,000 digits", responding(b'{"a": ' + b"9" * 100_000 + b"}"), sentence=NO_JSON)
add(
    "server-sent events",
    responding(b'data: {"choices": []}\n\n', 200, {"Content-Type": "text/event-stream"}),
    sentence=NO_JSON,
)
add(
    "an error with 200",
    responding(b'{"error": {"message": "overloaded"}}'),
    sentence=f"{INVALID}.*overloaded",
)
add("another API's answer", responding(b'{"generated_text": "hi"}'), sentence=INVALID)
