"""Who may use a server of this package: Host, Origin and token checks, and where it may listen.

Every server here runs on the machine of a person with a browser. A web page that this person opens
can send requests to it, directly or after it has pointed a name of its own at 127.0.0.1 (DNS
rebinding); the checks of Host and Origin refuse both.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from skyfleet.errors import ConfigError

TOKEN_VARIABLE = "SKYFLEET_API_KEY"
MAX_BODY_BYTES = 16 * 1024 * 1024
"""Two million token ids, or a conversation of four million tokens as text."""
MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 128
MAX_TARGET_BYTES = 16 * 1024
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})

Headers = Sequence[tuple[bytes, bytes]]

_HOST = re.compile(
    r"(?:\[(?P<ipv6>[0-9a-f:.]+)\]|(?P<name>[^\s:/?#@\[\]]+))(?::(?P<port>\d{1,5}))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    status: int
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessPolicy:
    """The rules of one server; `check` applies them to the head of a request."""

    hosts: frozenset[str] = LOOPBACK_NAMES
    """The names that the Host header may have."""
    allows_addresses: bool = False
    """Whether any IP address may be in it: no page can rebind one."""
    token: str | None = None
    open_paths: frozenset[str] = frozenset({"/health"})
    """Paths that need no token."""
    max_body_bytes: int = MAX_BODY_BYTES
    remedy: str = "start the server with --allow-host NAME"
    """How another name is allowed."""

    def check(
        self, method: str, path: str, headers: Headers, *, is_logged_in: bool = False
    ) -> Refusal | None:
        """Why the request is refused, or None."""
        if not path.startswith("/"):
            return Refusal(status=400, sentence="the request target is not a path; send one")
        if len(path) > MAX_TARGET_BYTES:
            return Refusal(status=414, sentence="the request target is too long")
        n_bytes = sum(len(name) + len(value) for name, value in headers)
        if len(headers) > MAX_HEADERS or n_bytes > MAX_HEADER_BYTES:
            return Refusal(status=431, sentence="the headers are too large or too many")
        return (
            self._check_host(headers)
            or self._check_origin(method, headers)
            or (None if is_logged_in or path in self.open_paths else self.check_token(headers))
            or self._check_length(headers)
        )

    def check_token(self, headers: Headers) -> Refusal | None:
        if self.token is None or has_bearer_token(headers, self.token):
            return None
        return Refusal(
            status=401,
            sentence="the Authorization header does not contain this server's token; "
            "send Bearer <token>",
        )

    def _check_host(self, headers: Headers) -> Refusal | None:
        values = find_values(headers, b"host")
        host = values[0].decode("latin-1").strip().lower() if len(values) == 1 else ""
        match = _HOST.fullmatch(host)
        name = (match["ipv6"] or match["name"]) if match else ""
        if name in self.hosts or (self.allows_addresses and _is_address(name)):
            return None
        allowed = ", ".join(sorted(self.hosts))
        return Refusal(
            status=403,
            sentence=f"Host {host[:200]!r} is not allowed; use {allowed}, or {self.remedy}",
        )

    def _check_origin(self, method: str, headers: Headers) -> Refusal | None:
        """Only browsers send these headers; a page of another origin has no business here."""
        origins = find_values(headers, b"origin")
        hosts = find_values(headers, b"host")
        same = (
            [f"{scheme}://{_strip_port(hosts[0])}" for scheme in ("http", "https")] if hosts else []
        )
        if origins and (len(origins) > 1 or _strip_port(origins[0]) not in same):
            return Refusal(status=403, sentence="requests of other web pages are refused")
        site = find_values(headers, b"sec-fetch-site")
        is_foreign = bool(site) and any(value not in (b"same-origin", b"none") for value in site)
        opens_page = method in ("GET", "HEAD") and (
            find_values(headers, b"sec-fetch-mode"),
            find_values(headers, b"sec-fetch-dest"),
        ) == ([b"navigate"], [b"document"])
        if is_foreign and not opens_page:
            return Refusal(status=403, sentence="requests of other web pages are refused")
        return None

    def _check_length(self, headers: Headers) -> Refusal | None:
        lengths = find_values(headers, b"content-length")
        if len(lengths) > 1 or (lengths and find_values(headers, b"transfer-encoding")):
            return Refusal(status=400, sentence="the length of the body is ambiguous")
        if not lengths:
            return None
        if not lengths[0].isdigit() or len(lengths[0]) > 18:
            return Refusal(status=400, sentence="Content-Length is not a number of bytes")
        return self.refuse_body() if int(lengths[0]) > self.max_body_bytes else None

    def refuse_body(self) -> Refusal:
        sentence = f"the body is larger than {self.max_body_bytes} bytes"
        return Refusal(status=413, sentence=sentence)


def build_access_policy(
    host: str,
    *,
    token: str | None,
    allowed_hosts: Iterable[str] = (),
    open_paths: Iterable[str] = ("/health",),
    key: str = "--allow-host",
) -> AccessPolicy:
    """The policy of a server that listens on `host`; ports of `allowed_hosts`, given as `key`, are ignored."""
    host = strip_brackets(host)
    is_wildcard = host in ("", "0.0.0.0", "::", "0")
    names = {host.lower()} if not is_wildcard else {socket.gethostname().lower()}
    return AccessPolicy(
        hosts=LOOPBACK_NAMES | names | {_read_name(name, key) for name in allowed_hosts},
        allows_addresses=is_wildcard,
        token=token,
        open_paths=frozenset(open_paths),
    )


def _read_name(given: str, key: str) -> str:
    """The name in `name`, `name:port`, `[::1]:port` or `::1`, as a Host header has it."""
    name = given.strip().lower()
    if _is_address(name):
        return name
    match = _HOST.fullmatch(name)
    if match is None:
        raise ConfigError(
            f"{key} {given!r} is not the name of a host; give one such as train.example"
        )
    return str(match["ipv6"] or match["name"])


def strip_brackets(host: str) -> str:
    """`::1` for `[::1]`."""
    return host.removeprefix("[").removesuffix("]")


def choose_family(host: str) -> socket.AddressFamily:
    """Of the socket that listens on `host`."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def format_url(host: str, port: int) -> str:
    """`http://[::1]:8000`: an IPv6 address needs brackets in a URL."""
    host = strip_brackets(host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def check_bind(
    host: str, token: str | None, *, key: str = "--host", variable: str = TOKEN_VARIABLE
) -> None:
    """ConfigError for a server that other machines can use without a token."""
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"{key}={host!r} lets other machines use this server, and it has no token; set the "
            f"environment variable {variable} to a secret of your choice, or use {key}=127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to a server that listens on `host`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host or "0.0.0.0", None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(entry[4][0])).is_loopback for entry in found)


def read_token(variable: str = TOKEN_VARIABLE) -> str | None:
    """The token in the environment; ConfigError for one that no HTTP header can carry."""
    token = os.environ.get(variable) or None
    if token is not None and not re.fullmatch(r"[!-~]+", token):
        raise ConfigError(
            f"{variable} contains a space, a line break or a character outside ASCII, which no "
            "HTTP header can carry; set another"
        )
    return token


def has_bearer_token(headers: Headers, token: str) -> bool:
    """Whether exactly one Authorization header carries the token; compared in constant time."""
    values = find_values(headers, b"authorization")
    if len(values) != 1:
        return False
    scheme, _, given = values[0].partition(b" ")
    return hmac.compare_digest(given.strip(), token.encode()) and scheme.lower() == b"bearer"


def find_values(headers: Headers, name: bytes) -> list[bytes]:
    return [value for key, value in headers if key.lower() == name]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _strip_port(origin: bytes) -> str:
    """Lower case, without the port that the scheme implies."""
    text = origin.decode("latin-1").strip().lower()
    return re.sub(r"(?<=[^:/]):(?:80|443)$", "", text)
