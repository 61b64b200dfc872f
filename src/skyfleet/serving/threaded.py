"""A read-only HTTP server with one thread per request, the access checks of every server, and limits.

For servers beside other work: the viewer, and the metrics of a run. They need no uvicorn.
"""

from __future__ import annotations

import json
import logging
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import BoundedSemaphore
from time import monotonic
from typing import Any

from skyfleet.serving.access import (
    AccessPolicy,
    Headers,
    Refusal,
    choose_family,
    find_values,
    strip_brackets,
)

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 128
REQUEST_SECONDS = 20.0
"""How long a client may take to send a request."""
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+: [^\x00-\x08\x0a-\x1f\x7f]*")

Response = tuple[HTTPStatus, str, bytes]
"""Status, content type and body."""


class ThreadedServer(ThreadingHTTPServer):
    """Listens on `host`; raises OSError if the port is in use. The caller runs `serve_forever`."""

    daemon_threads = True

    def __init__(
        self, host: str, port: int, handler: type[ThreadedHandler], policy: AccessPolicy
    ) -> None:
        self.host, self.policy = strip_brackets(host), policy
        self._waiting: dict[socket.socket, float] = {}
        self._slots = BoundedSemaphore(MAX_CONNECTIONS)
        self.address_family = choose_family(self.host)
        super().__init__((self.host, port), handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._waiting.pop(request, None)
            self._slots.release()

    def expect_request(self, connection: socket.socket, *, is_expected: bool) -> None:
        """Start or stop the clock of a request on this connection."""
        if is_expected:
            self._waiting[connection] = monotonic() + REQUEST_SECONDS
        else:
            self._waiting.pop(connection, None)

    def service_actions(self) -> None:
        """Called twice per second: disconnect clients that send a request too slowly."""
        for connection, deadline in list(self._waiting.items()):
            if monotonic() > deadline:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that closes the connection early is not an error."""
        logger.debug("connection closed by the client", exc_info=True)


class ThreadedHandler(BaseHTTPRequestHandler):
    """Answers GET with `respond`, after the checks; a subclass implements it."""

    server: ThreadedServer
    protocol_version = "HTTP/1.1"
    server_version = "skyfleet"
    sys_version = ""
    timeout = 60
    # Otherwise a small response waits 40 ms for the acknowledgement of its headers.
    disable_nagle_algorithm = True
    security_headers: Mapping[str, str] = {
        "X-Content-Type-Options": "nosniff",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }

    def respond(self, path: str, query: str) -> Response:
        raise NotImplementedError

    def respond_refused(self, refusal: Refusal, path: str, query: str) -> Response:
        return make_error(HTTPStatus(refusal.status), refusal.sentence)

    def is_logged_in(self, headers: Headers) -> bool:
        """Whether the client has shown the token before."""
        return False

    def add_headers(self, status: HTTPStatus) -> Mapping[str, str]:
        """Headers of one response."""
        if status == HTTPStatus.UNAUTHORIZED:
            return {"WWW-Authenticate": "Bearer"}
        return {}

    def handle_one_request(self) -> None:
        self.server.expect_request(self.connection, is_expected=True)
        super().handle_one_request()

    def parse_request(self) -> bool:
        is_valid = super().parse_request()
        self.server.expect_request(self.connection, is_expected=False)
        if is_valid and (
            self.headers.defects
            or not all(map(_HEADER.fullmatch, map(": ".join, self.headers.items())))
        ):
            self.send_error(HTTPStatus.BAD_REQUEST, "a header is malformed")
            return False
        return is_valid

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        headers = [
            (name.lower().encode(), value.encode("latin-1", "replace"))
            for name, value in self.headers.items()
        ]
        policy, is_logged_in = self.server.policy, self.is_logged_in(headers)
        refusal = policy.check("GET", self.path, headers, is_logged_in=is_logged_in)
        if find_values(headers, b"transfer-encoding"):
            refusal = refusal or policy.refuse_body()
        if refusal is not None:
            self.close_connection = True  # a body may follow
            self._send(*self.respond_refused(refusal, path, query))
        else:
            self._send(*self.respond(path, query))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Errors of http.server itself, such as for POST, with the same headers as all responses."""
        self.close_connection = True  # the body of the rejected request may follow
        self._send(*make_error(HTTPStatus(code), message or HTTPStatus(code).phrase))

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        headers = {**self.security_headers, **self.add_headers(status)}
        headers |= {"Content-Type": kind, "Content-Length": str(len(body))}
        if self.close_connection:
            headers["Connection"] = "close"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def make_error(status: HTTPStatus, sentence: str) -> Response:
    return status, "application/json", json.dumps({"error": sentence}).encode("ascii")
