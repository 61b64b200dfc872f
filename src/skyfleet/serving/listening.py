"""uvicorn with the guard in front of the app, bounded headers, and a deadline for slow requests."""

from __future__ import annotations

import asyncio
from typing import Any

from skyfleet.errors import MissingExtraError
from skyfleet.serving.access import MAX_HEADER_BYTES, AccessPolicy
from skyfleet.serving.guard import Guard

try:
    import h11
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError:
    raise MissingExtraError("uvicorn", "serve") from None

KEEP_ALIVE_SECONDS = 75
"""nginx's. uvicorn's 5 s are httpx's, too: a client that takes 5 s between two requests would send the
second on a connection that is being closed."""
HEADER_SECONDS = 30.0
"""How long a client may take to send the head of a request."""

_TIMEOUT_RESPONSE = (
    b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
)


def build_uvicorn_config(app: Any, policy: AccessPolicy, **options: Any) -> uvicorn.Config:
    """The settings of a server of `app`; `options` are uvicorn's.

    Logs go through Python's logging, whose default handler `skyfleet.terminal` filters.
    """
    return uvicorn.Config(
        Guard(app, policy),
        # httptools does not bound the size of headers.
        http=TimedH11Protocol,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        ws_max_size=policy.max_body_bytes,
        proxy_headers=False,
        server_header=False,
        log_config=None,
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        **options,
    )


def build_server(app: Any, policy: AccessPolicy, **options: Any) -> uvicorn.Server:
    return uvicorn.Server(build_uvicorn_config(app, policy, **options))


class TimedH11Protocol(H11Protocol):
    """Closes a connection whose request does not arrive in time."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._timer is None:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(HEADER_SECONDS, self._close_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close_slow(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(_TIMEOUT_RESPONSE)
            self.transport.close()
