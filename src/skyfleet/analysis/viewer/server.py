"""HTTP server of the viewer: read-only, with the access checks of every server here and a strict
content security policy.

With a token, a browser logs in once with `/?token=...`, which sets a cookie.
"""

from __future__ import annotations

import hmac
import json
import logging
import re
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from secrets import token_hex, token_urlsafe
from threading import BoundedSemaphore
from time import monotonic
from typing import Any
from urllib.parse import parse_qsl, quote, unquote

from skyfleet.analysis.viewer.api import Viewer
from skyfleet.errors import ConfigError, SkyfleetError
from skyfleet.serving.access import (
    Headers,
    build_access_policy,
    check_bind,
    choose_family,
    find_values,
    format_url,
    strip_brackets,
)
from skyfleet.trajectories.records import RecordError

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
MAX_CONNECTIONS = 128
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+: [^\x00-\x08\x0a-\x1f\x7f]*")
REQUEST_SECONDS = 20.0
"""How long a client may take to send a request."""
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

Response = tuple[HTTPStatus, str, bytes]


class ViewerAccess:
    """Who may read: the rules of all servers, and a cookie for browsers that sent the token once."""

    def __init__(
        self, host: str = HOST, *, token: str | None = None, allowed_hosts: Iterable[str] = ()
    ) -> None:
        check_bind(host, token)
        self.host = strip_brackets(host)
        policy = build_access_policy(host, token=token, allowed_hosts=allowed_hosts, open_paths=())
        self.policy = replace(policy, max_body_bytes=0)
        # Cookies are shared by all ports of a host; a name of its own keeps viewers apart.
        self._name, self._session = f"skyfleet_{token_hex(4)}", token_urlsafe(32)

    def make_cookie(self) -> str:
        return f"{self._name}={self._session}; HttpOnly; SameSite=Strict; Path=/"

    def find_cookie(self, headers: Headers) -> bool:
        """Whether the browser has logged in."""
        wanted = f"{self._name}={self._session}".encode()
        pairs = b";".join(find_values(headers, b"cookie")).split(b";")
        return any(hmac.compare_digest(pair.strip(), wanted) for pair in pairs)

    def accepts_login(self, path: str, query: str) -> bool:
        """Whether this is the login address with the right token."""
        given = [value for name, value in parse_qsl(query) if name == "token"]
        bearer = [(b"authorization", f"Bearer {value}".encode()) for value in given]
        return path == "/" and self.policy.check_token(bearer) is None


class ViewerServer(ThreadingHTTPServer):
    """Serves one viewer, with one thread per request."""

    daemon_threads = True

    def __init__(
        self, viewer: Viewer, port: int = 0, *, access: ViewerAccess | None = None
    ) -> None:
        self.viewer, self.access = viewer, access or ViewerAccess()
        self._waiting: dict[socket.socket, float] = {}
        self._slots = BoundedSemaphore(MAX_CONNECTIONS)
        self.address_family = choose_family(self.access.host)
        folder = files("skyfleet.analysis.viewer") / "static"
        self.static = {file.name: file.read_bytes() for file in folder.iterdir()}
        try:
            super().__init__((self.access.host, port), _Handler)
        except OSError as error:
            raise ConfigError(f"--port {port}: {error.strerror}; choose another") from None

    @property
    def url(self) -> str:
        return f"{format_url(self.access.host, self.server_port)}/"

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

    def episode_url(self, entry_id: str) -> str:
        """The address of an episode."""
        return f"{self.url}#episode={quote(entry_id)}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that closes the connection early is not an error."""
        logger.debug("connection closed by the browser", exc_info=True)


@contextmanager
def open_viewer(
    viewer: Viewer, port: int = 0, *, access: ViewerAccess | None = None
) -> Iterator[ViewerServer]:
    """Listen on the port; the caller runs `serve_forever`."""
    with ViewerServer(viewer, port, access=access) as server:
        try:
            yield server
        finally:
            viewer.close()


class _Handler(BaseHTTPRequestHandler):
    server: ViewerServer
    protocol_version = "HTTP/1.1"
    server_version = "skyfleet"
    sys_version = ""
    timeout = 60
    # Otherwise a small response waits 40 ms for the acknowledgement of its headers.
    disable_nagle_algorithm = True

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
        self._send(*self._respond())

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Errors of http.server itself, such as for POST, with the same headers as all responses."""
        self.close_connection = True  # the body of the rejected request may follow
        self._send(*_error(HTTPStatus(code), message or HTTPStatus(code).phrase))

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)

    def _respond(self) -> Response:
        access, (path, _, query) = self.server.access, self.path.partition("?")
        headers = [
            (name.lower().encode(), value.encode("latin-1", "replace"))
            for name, value in self.headers.items()
        ]
        is_logged_in = access.find_cookie(headers)
        refusal = access.policy.check("GET", self.path, headers, is_logged_in=is_logged_in)
        if find_values(headers, b"transfer-encoding"):
            refusal = refusal or access.policy.refuse_body()
        if refusal is not None:
            self.close_connection = True  # a body may follow
            sentence = refusal.sentence
            if refusal.status == HTTPStatus.UNAUTHORIZED:
                if access.accepts_login(path, query):
                    return HTTPStatus.SEE_OTHER, "text/plain", b""
                sentence = f"this viewer needs a token; open {self.server.url}?token=<token>"
            return _error(HTTPStatus(refusal.status), sentence)
        try:
            return self._route(path, query)
        except SkyfleetError as error:
            not_found = isinstance(error, RecordError)
            status = HTTPStatus.NOT_FOUND if not_found else HTTPStatus.BAD_REQUEST
            return _error(status, str(error))
        except OSError as error:
            return _error(HTTPStatus.NOT_FOUND, f"{error.filename}: {error.strerror}; reload")
        except Exception:
            logger.exception("%s failed", self.path)
            return _error(
                HTTPStatus.INTERNAL_SERVER_ERROR,
                "internal error; see the log in the terminal of the viewer",
            )

    def _route(self, path: str, query: str) -> Response:
        viewer, params = self.server.viewer, dict(parse_qsl(query))
        match unquote(path).split("/")[1:]:
            case ["api", "run"]:
                return _json(viewer.run(params))
            case ["api", "episodes"]:
                return _json(viewer.episodes(params))
            case ["api", "compare"]:
                return _json(viewer.compare(params))
            case ["api", "episode", *entry_id]:
                return _json(viewer.episode("/".join(entry_id)))
            case ["api", "tokens", *entry_id]:
                return _json(viewer.tokens("/".join(entry_id)))
            case ["api", "picture", *entry_id, number] if number.isdecimal():
                return HTTPStatus.OK, *viewer.picture("/".join(entry_id), int(number))
            case [name] if (page := self.server.static.get(name or "index.html")) is not None:
                kind = _TYPES[(name or "index.html").rpartition(".")[2]]
                return HTTPStatus.OK, f"{kind}; charset=utf-8", page
        return _error(HTTPStatus.NOT_FOUND, f"{path!r} does not exist; start at {self.server.url}")

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        headers = _HEADERS | {"Content-Type": kind, "Content-Length": str(len(body))}
        if self.close_connection:
            headers["Connection"] = "close"
        if status == HTTPStatus.SEE_OTHER:
            headers |= {"Location": "/", "Set-Cookie": self.server.access.make_cookie()}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def _json(value: Any) -> Response:
    # ASCII, because a model may write half a surrogate pair.
    body = json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")
    return HTTPStatus.OK, "application/json", body


def _error(status: HTTPStatus, sentence: str) -> Response:
    return status, "application/json", json.dumps({"error": sentence}).encode("ascii")
