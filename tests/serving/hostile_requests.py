"""Hostile HTTP requests as raw bytes, with the statuses that a server may answer them with."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field

TOKEN = "s3cret-token-of-the-suite"
CLOSED = 0
"""The connection was closed without a response."""
MALFORMED = frozenset({400, 403, 408, 413, 414, 431, 501, 505, CLOSED})
NOT_FOUND = frozenset({400, 403, 404, 405, 501})
BAD_BODY = frozenset({400, 404, 405, 413, 422, 501})
LIMIT = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of server and the requests that it answers."""

    good: str = "GET /health"
    good_body: bytes = b""
    good_statuses: frozenset[int] = frozenset({200})
    post: str = "/health"
    needs_token: bool = True
    """For `good`."""
    token: str = TOKEN
    has_websocket: bool = False
    splits_at_carriage_returns: bool = False
    """Python's http.server takes what follows for another header, which has no effect here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    request: bytes
    statuses: frozenset[int] = field(default=MALFORMED)


def list_cases(kind: Kind, port: int) -> Iterator[Case]:
    suite = _Suite(kind, port)
    yield from suite.hosts()
    yield from suite.origins()
    yield from suite.targets()
    yield from suite.lengths()
    yield from suite.heads()
    yield from suite.bodies()
    yield from suite.methods()
    yield from suite.sockets()
    yield from suite.tokens()


class _Suite:
    def __init__(self, kind: Kind, port: int) -> None:
        self.kind, self.port = kind, port
        self.host = f"127.0.0.1:{port}"

    def make(
        self,
        line: str | None = None,
        *headers: str,
        body: bytes = b"",
        host: str | None = "",
        has_token: bool = True,
        length: bool = True,
    ) -> bytes:
        if line is None:
            line, body = self.kind.good, self.kind.good_body
        lines = [f"{line} HTTP/1.1"]
        lines += [f"Host: {host or self.host}"] if host is not None else []
        lines += [f"Authorization: Bearer {self.kind.token}"] if has_token else []
        lines += [*headers]
        lines += [f"Content-Length: {len(body)}"] if body and length else []
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body

    def hosts(self) -> Iterator[Case]:
        refused = frozenset({400, 403})
        for host in (
            "evil.example",
            f"evil.example:{self.port}",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "evil-localhost",
            "user@127.0.0.1",
            "127.0.0.1@evil.example",
            "127.0.0.1/evil",
            "0.0.0.0",
            "[::ffff:127.0.0.1]",
            "[::]",
            "2130706433",
            "127.1",
            "localhost.",
            "localhost:99999999",
            "10.0.0.7",
            "l\xf6calhost",
            "localhost evil.example",
            "localhost,evil.example",
        ):
            yield Case(name=f"Host {host}", request=self.make(host=host), statuses=refused)
        yield Case(name="no Host", request=self.make(host=None), statuses=refused)
        yield Case(name="empty Host", request=self.make(None, "Host:", host=None), statuses=refused)
        yield Case(
            name="two Hosts", request=self.make(None, "Host: evil.example"), statuses=refused
        )

    def origins(self) -> Iterator[Case]:
        for origin in (
            "null",
            "https://evil.example",
            "http://127.0.0.1:1",
            f"http://localhost:{self.port}",
            f"http://127.0.0.1:{self.port}.evil.example",
            f"http://evil.example/http://127.0.0.1:{self.port}",
            "file://",
            "http://",
        ):
            request = self.make(None, f"Origin: {origin}")
            yield Case(name=f"Origin {origin}", request=request, statuses=frozenset({403}))
        own = f"Origin: http://{self.host}"
        for name, headers in {
            "two Origins": (own, "Origin: https://evil.example"),
            "a picture of another site": ("Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: no-cors"),
            "a fetch of another port": ("Sec-Fetch-Site: same-site", "Sec-Fetch-Mode: cors"),
            "a frame of another site": (
                "Sec-Fetch-Site: cross-site",
                "Sec-Fetch-Mode: navigate",
                "Sec-Fetch-Dest: iframe",
            ),
        }.items():
            request = self.make(None, *headers)
            yield Case(name=name, request=request, statuses=frozenset({403}))

    def targets(self) -> Iterator[Case]:
        for path in (
            "/../../../../etc/passwd",
            "/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
            "/..%2f..%2f..%2fetc%2fpasswd",
            "/%252e%252e%252f%252e%252e%252fetc%252fpasswd",
            "/..%c0%af..%c0%afetc/passwd",
            "/....//....//etc/passwd",
            "/..%5c..%5cetc%5cpasswd",
            "//etc/passwd",
            "//evil.example/%2e%2e",
            "//[::1",
            "/file:///etc/passwd",
            "/%00/etc/passwd",
            "/v1/../../etc/passwd",
            "/static/..%2f..%2fserver.py",
            "/%ff%fe",
            "/" + "a/" * 2000,
        ):
            yield Case(
                name=f"path {path[:50]}", request=self.make(f"GET {path}"), statuses=NOT_FOUND
            )
        for target in ("http://evil.example/", f"http://{self.host}/", "evil.example:80", "x", "*"):
            request = self.make(f"GET {target}")
            yield Case(name=f"target {target}", request=request, statuses=frozenset({400, 403}))
        request = self.make("CONNECT evil.example:443")
        yield Case(name="CONNECT", request=request, statuses=NOT_FOUND)

    def lengths(self) -> Iterator[Case]:
        post = f"POST {self.kind.post}"
        too_large = frozenset({413, 501})
        chunk = b"%x\r\n" % 4096 + b"x" * 4096 + b"\r\n"
        chunked = "Transfer-Encoding: chunked"
        for name, request, statuses in (
            ("announced body", self.make(post, f"Content-Length: {LIMIT + 1}"), too_large),
            ("announced exabytes", self.make(post, f"Content-Length: {10**17}"), too_large),
            ("sent body", self.make(post, body=b" " * (4 * LIMIT)), too_large),
            ("chunked body", self.make(post, chunked) + chunk * 64, too_large | {CLOSED}),
            ("length -1", self.make(post, "Content-Length: -1"), MALFORMED),
            ("length abc", self.make(post, "Content-Length: abc"), MALFORMED),
            (
                "length +5",
                self.make(post, "Content-Length: +5", body=b"12345", length=False),
                MALFORMED,
            ),
            ("length of 30 digits", self.make(post, f"Content-Length: {'9' * 30}"), MALFORMED),
            ("two lengths", self.make(post, "Content-Length: 3", body=b"12345"), MALFORMED),
            (
                "length and chunks",
                self.make(post, chunked, "Content-Length: 4") + b"0\r\n\r\n",
                MALFORMED,
            ),
            ("gzip coding", self.make(post, "Transfer-Encoding: gzip, chunked"), MALFORMED),
            ("two codings", self.make(post, chunked, "Transfer-Encoding: identity"), MALFORMED),
            ("bad chunk size", self.make(post, chunked) + b"zz\r\nxx\r\n", MALFORMED),
            ("endless chunk size", self.make(post, chunked) + b"1" * 70_000, MALFORMED),
        ):
            yield Case(name=name, request=request, statuses=statuses)

    def heads(self) -> Iterator[Case]:
        good = self.make()
        for name, request in {
            "header of 100 kB": self.make(None, f"X-Long: {'a' * 100_000}"),
            "10,000 headers": self.make(None, *(f"X-{n}: 1" for n in range(10_000))),
            "target of 100 kB": self.make(f"GET /{'a' * 100_000}"),
            "space before the colon": self.make(None, "X-Bad : 1"),
            "NUL in a header": self.make(None, "X-Bad: a\x00b"),
            "carriage return in a header": self.make(None, "X-Bad: a\rSet-Cookie: b"),
            "header without a colon": self.make(None, "nonsense"),
            "HTTP/0.9": b"GET /\r\n\r\n",
            "HTTP/9.9": good.replace(b"HTTP/1.1", b"HTTP/9.9", 1),
            "no version": good.replace(b" HTTP/1.1", b"", 1),
            "two spaces in the line": b"GET  /  HTTP/1.1\r\nHost: "
            + self.host.encode()
            + b"\r\n\r\n",
            "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 600 + b"\r\n\r\n",
            "binary": bytes(range(256)) * 8 + b"\r\n\r\n",
            "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        }.items():
            # http.server takes two spaces for one, and this request has no token.
            lenient = frozenset({401, 404} if name == "two spaces in the line" else ())
            if name == "carriage return in a header" and self.kind.splits_at_carriage_returns:
                lenient = frozenset({200})
            yield Case(name=name, request=request, statuses=MALFORMED | lenient)

    def bodies(self) -> Iterator[Case]:
        post = f"POST {self.kind.post}"
        for name, body in {
            "no JSON": b"{nope",
            "an empty body": b" ",
            "deep JSON": b"[" * 30_000,
            "deep objects": b'{"a":' * 10_000,
            "no UTF-8": b'{"model": "\xff\xfe"}',
            "lone surrogate": b'{"model": "\\ud800", "messages": "\\udfff"}',
            "a list": b"[1, 2, 3]",
            "a number of 5,000 digits": b'{"n": ' + b"9" * 5000 + b"}",
            "NaN": b'{"temperature": NaN, "id": Infinity}',
            "wrong types": json.dumps(
                {"model": 1, "messages": {}, "method": [], "id": {}}
            ).encode(),
            "a billion laughs": b"<!DOCTYPE x [<!ENTITY a 'aaaa'>]><x>&a;&a;</x>",
        }.items():
            request = self.make(post, "Content-Type: application/json", body=body)
            # JSON-RPC answers an error with 200, and a notification with 202.
            yield Case(name=f"body: {name}", request=request, statuses=BAD_BODY | {200, 202})

    def methods(self) -> Iterator[Case]:
        path = self.kind.good.partition(" ")[2]
        for method in ("PUT", "PATCH", "DELETE", "TRACE", "OPTIONS", "GETT", "get", "X" * 300):
            request = self.make(f"{method} {path}")
            yield Case(name=f"method {method[:9]}", request=request, statuses=NOT_FOUND)

    def sockets(self) -> Iterator[Case]:
        upgrade = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13")
        key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
        refused = frozenset({403}) if self.kind.has_websocket else NOT_FOUND
        for origin in ("null", "https://evil.example", "http://127.0.0.1:1"):
            request = self.make("GET /ws", *upgrade, key, f"Origin: {origin}")
            yield Case(name=f"socket of {origin}", request=request, statuses=refused)
        request = self.make("GET /ws", *upgrade, key, host="evil.example")
        yield Case(name="socket by a foreign name", request=request, statuses=frozenset({400, 403}))

    def tokens(self) -> Iterator[Case]:
        if not self.kind.needs_token:
            return
        authorization = "Authorization: Bearer"
        for name, headers in {
            "no token": (),
            "wrong token": (f"{authorization} wrong",),
            "part of the token": (f"{authorization} {TOKEN[:-1]}",),
            "token and more": (f"{authorization} {TOKEN}x",),
            "token twice": (f"{authorization} {TOKEN}, {TOKEN}",),
            "two tokens": (f"{authorization} {TOKEN}", f"{authorization} wrong"),
            "two tokens, the wrong one first": (f"{authorization} x", f"{authorization} {TOKEN}"),
            "another scheme": (f"Authorization: Basic {TOKEN}",),
            "no scheme": (f"Authorization: {TOKEN}",),
            "empty token": (f"{authorization} ",),
            "token beyond ASCII": (f"{authorization} \xfc\xdf",),
            "token in a cookie": (f"Cookie: token={TOKEN}",),
            "token in another header": (f"X-Api-Key: {TOKEN}",),
        }.items():
            request = self.make(None, *headers, has_token=False)
            yield Case(name=name, request=request, statuses=frozenset({401}))


async def send_raw(port: int, request: bytes) -> tuple[int, bytes]:
    """The status and the response of a request; CLOSED if there was none."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        try:
            writer.write(request)
            await writer.drain()
            response = await asyncio.wait_for(reader.read(65536), 5)
        except ConnectionError:
            return CLOSED, b""
        except TimeoutError:
            return -1, b"no response"
        return (int(response.split(b" ", 2)[1]) if response[:5] == b"HTTP/" else CLOSED), response
    finally:
        writer.close()
