"""HTTP server of the viewer: read-only, with the access checks of every server here and a strict
content security policy.

With a token, a browser logs in once with `/?token=...`, which sets a cookie.
"""

from __future__ import annotations

import hmac
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http import HTTPStatus
from importlib.resources import files
from secrets import token_hex, token_urlsafe
from typing import Any
from urllib.parse import parse_qsl, quote, unquote

from skyfleet.analysis.viewer.api import Viewer
from skyfleet.errors import ConfigError, SkyfleetError
from skyfleet.serving.access import (
    Headers,
    Refusal,
    build_access_policy,
    check_bind,
    find_values,
    format_url,
    strip_brackets,
)
from skyfleet.serving.threaded import Response, ThreadedHandler, ThreadedServer, make_error
from skyfleet.trajectories.records import RecordError

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
}


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


class ViewerServer(ThreadedServer):
    """Serves one viewer."""

    def __init__(
        self, viewer: Viewer, port: int = 0, *, access: ViewerAccess | None = None
    ) -> None:
        self.viewer, self.access = viewer, access or ViewerAccess()
        folder = files("skyfleet.analysis.viewer") / "static"
        self.static = {file.name: file.read_bytes() for file in folder.iterdir()}
        try:
            super().__init__(self.access.host, port, _Handler, self.access.policy)
        except OSError as error:
            raise ConfigError(f"--port {port}: {error.strerror}; choose another") from None

    @property
    def url(self) -> str:
        return f"{format_url(self.access.host, self.server_port)}/"

    def episode_url(self, entry_id: str) -> str:
        """The address of an episode."""
        return f"{self.url}#episode={quote(entry_id)}"


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


class _Handler(ThreadedHandler):
    server: ViewerServer
    security_headers: Mapping[str, str] = {**_HEADERS, **ThreadedHandler.security_headers}

    def is_logged_in(self, headers: Headers) -> bool:
        return self.server.access.find_cookie(headers)

    def add_headers(self, status: HTTPStatus) -> Mapping[str, str]:
        if status == HTTPStatus.SEE_OTHER:
            return {"Location": "/", "Set-Cookie": self.server.access.make_cookie()}
        return {}

    def respond_refused(self, refusal: Refusal, path: str, query: str) -> Response:
        if refusal.status != HTTPStatus.UNAUTHORIZED:
            return super().respond_refused(refusal, path, query)
        if self.server.access.accepts_login(path, query):
            return HTTPStatus.SEE_OTHER, "text/plain", b""
        sentence = f"this viewer needs a token; open {self.server.url}?token=<token>"
        return make_error(HTTPStatus.UNAUTHORIZED, sentence)

    def respond(self, path: str, query: str) -> Response:
        try:
            return self._route(path, query)
        except SkyfleetError as error:
            not_found = isinstance(error, RecordError)
            status = HTTPStatus.NOT_FOUND if not_found else HTTPStatus.BAD_REQUEST
            return make_error(status, str(error))
        except OSError as error:
            return make_error(HTTPStatus.NOT_FOUND, f"{error.filename}: {error.strerror}; reload")
        except Exception:
            logger.exception("%s failed", self.path)
            return make_error(
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
        return make_error(
            HTTPStatus.NOT_FOUND, f"{path!r} does not exist; start at {self.server.url}"
        )


def _json(value: Any) -> Response:
    # ASCII, because a model may write half a surrogate pair.
    body = json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")
    return HTTPStatus.OK, "application/json", body
