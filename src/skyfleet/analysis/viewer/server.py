"""HTTP server of the viewer: local, read-only, with a strict content security policy."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from skyfleet.analysis.viewer.api import Viewer
from skyfleet.errors import ConfigError, SkyfleetError
from skyfleet.trajectories.records import RecordError

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
_LOCAL_NAMES = ("127.0.0.1", "localhost")
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


class ViewerServer(ThreadingHTTPServer):
    """Serves one viewer, with one thread per request."""

    daemon_threads = True

    def __init__(self, viewer: Viewer, port: int = 0) -> None:
        self.viewer = viewer
        folder = files("skyfleet.analysis.viewer") / "static"
        self.static = {file.name: file.read_bytes() for file in folder.iterdir()}
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise ConfigError(f"--port {port}: {error.strerror}; choose another") from None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    def episode_url(self, entry_id: str) -> str:
        """The address of an episode."""
        return f"{self.url}#episode={quote(entry_id)}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that closes the connection early is not an error."""
        logger.debug("connection closed by the browser", exc_info=True)


@contextmanager
def open_viewer(viewer: Viewer, port: int = 0) -> Iterator[ViewerServer]:
    """Listen on the port; the caller runs `serve_forever`."""
    with ViewerServer(viewer, port) as server:
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

    def do_GET(self) -> None:
        self._send(*self._respond())

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Errors of http.server itself, such as for POST, with the same headers as all responses."""
        self.close_connection = True  # the body of the rejected request may follow
        self._send(*_error(HTTPStatus(code), message or HTTPStatus(code).phrase))

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)

    def _respond(self) -> Response:
        # Prevents DNS rebinding: a foreign page cannot choose the Host header.
        if (host := self.headers.get("Host", "")).partition(":")[0] not in _LOCAL_NAMES:
            return _error(HTTPStatus.FORBIDDEN, f"Host {host!r}; use {self.server.url}")
        try:
            return self._route(urlsplit(self.path).path)
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

    def _route(self, path: str) -> Response:
        viewer = self.server.viewer
        params = dict(parse_qsl(urlsplit(self.path).query))
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
