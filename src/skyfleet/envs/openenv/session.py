"""Session: the WebSocket of one OpenEnv episode, with a deadline on every wait.

The server keeps one env a socket, so the state is lost with it: it is opened anew only until the
first reset has been answered.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from random import uniform
from time import monotonic
from typing import Any, Literal

from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from skyfleet.envs.content_blocks import shortened
from skyfleet.envs.tls import certificates
from skyfleet.errors import ConfigError, EnvError, MissingExtraError

try:
    from websockets.asyncio.client import ClientConnection, connect
    from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
except ImportError:
    raise MissingExtraError("websockets", "openenv") from None

_CLOSE_SECONDS = 2.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.05, 2.0
_TOO_BIG = 1009
_COMPLAINT_CHARACTERS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEnvSettings:
    base_url: str
    """http or https; the socket is its /ws."""
    connect_timeout_seconds: float = 10
    message_timeout_seconds: float = 60
    capacity_wait_seconds: float = 300
    """How long a server that is full, restarting or not there yet is tried again."""
    max_frame_bytes: int = 100 * 2**20
    max_result_characters: int = 20_000
    """A tool's longer result is cut, with a note."""

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"base_url={self.base_url!r}; write http://host:port")

    def url(self, path: str) -> str:
        return self.base_url.rstrip("/") + path


class Observed(BaseModel):
    """What the server saw after a reset or a step."""

    observation: dict[str, Any]
    reward: FiniteFloat | None = None
    done: bool = False

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.observation.get("metadata") or {}


class _Refusal(BaseModel):
    message: str = ""
    code: str = ""
    errors: list[dict[str, Any]] = Field(default_factory=list)

    @property
    def details(self) -> str:
        wrong = [(error.get("loc") or ["?"], error.get("msg")) for error in self.errors]
        return "; ".join(f"{'.'.join(map(str, place))}: {what}" for place, what in wrong)


class _Frame(BaseModel):
    type: str
    data: dict[str, Any] = Field(default_factory=dict)


class RefusedError(EnvError):
    """The server does not take this action; the session goes on."""


class _LostError(EnvError):
    """No session was to be had; another try may get one."""


class Session:
    def __init__(self, settings: OpenEnvSettings) -> None:
        self._settings = settings
        self._socket: ClientConnection | None = None

    async def open(self, reset: Mapping[str, Any]) -> Observed:
        """Connect and reset."""
        wait_seconds = self._settings.capacity_wait_seconds
        deadline, pause = monotonic() + wait_seconds, _FIRST_PAUSE_SECONDS
        while True:
            try:
                self._socket = await self._connect()
                return await self.ask("reset", reset)
            except _LostError as error:
                await self.close()
                if monotonic() + pause > deadline:
                    raise EnvError(f"{error}; tried for {wait_seconds:g} s") from error
            await asyncio.sleep(uniform(pause / 2, pause))
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def ask(self, kind: Literal["reset", "step"], data: Mapping[str, Any]) -> Observed:
        """One frame out, its answer back.

        A wait that fails or is cut short costs the socket: the late answer would be taken for the
        next one's.
        """
        if self._socket is None:
            raise EnvError(f"{self._settings.base_url}: no session is open; call reset first")
        frame = json.dumps({"type": kind, "data": dict(data)})
        try:
            async with asyncio.timeout(self._settings.message_timeout_seconds):
                raw = await _exchange(self._socket, frame)
        except (TimeoutError, ConnectionClosed) as error:
            self._drop()
            raise self._failure(kind, error) from error
        except BaseException:
            self._drop()
            raise
        return self._read(kind, raw)

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    async def close(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            with suppress(ConnectionClosed, TimeoutError):
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await socket.send('{"type": "close"}')
            await socket.close()

    def _drop(self) -> None:
        """Without a goodbye: whoever is being cancelled must not wait for one."""
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.transport.abort()

    async def _connect(self) -> ClientConnection:
        url = self._settings.url("/ws").replace("http", "ws", 1)
        try:
            return await connect(
                url,
                ssl=certificates() if url.startswith("wss") else None,
                open_timeout=self._settings.connect_timeout_seconds,
                close_timeout=_CLOSE_SECONDS,
                max_size=self._settings.max_frame_bytes,
                # Every answer has a deadline; a late pong tells nothing more.
                ping_timeout=None,
            )
        except InvalidStatus as error:
            kind = _LostError if error.response.status_code >= 500 else EnvError
            raise kind(f"{url}: answers HTTP {error.response.status_code}") from error
        except (OSError, InvalidHandshake, EOFError) as error:
            raise _LostError(f"{url}: {error or type(error).__name__}") from error

    def _failure(self, kind: str, error: TimeoutError | ConnectionClosed) -> EnvError:
        where = f"{self._settings.base_url}: {kind}"
        if isinstance(error, TimeoutError):
            seconds = self._settings.message_timeout_seconds
            return EnvError(f"{where} not answered in {seconds:g} s (message_timeout_seconds)")
        if error.sent is not None and error.sent.code == _TOO_BIG:
            size = self._settings.max_frame_bytes
            return EnvError(f"{where}: the answer is over max_frame_bytes={size}")
        lost = _LostError if kind == "reset" else EnvError
        return lost(f"{where}: the socket closed, {error}")

    def _read(self, kind: str, raw: str | bytes) -> Observed:
        where = f"{self._settings.base_url}: {kind}"
        try:
            frame = _Frame.model_validate_json(raw)
            if frame.type == "observation":
                return Observed.model_validate(frame.data)
            refusal = _Refusal.model_validate(frame.data)
        except ValidationError as error:
            raise EnvError(f"{where}: answered {raw[:80]!r}, which is no OpenEnv frame") from error
        complaint = shortened(refusal.message, _COMPLAINT_CHARACTERS)
        if refusal.code == "CAPACITY_REACHED":
            raise _LostError(f"{where}: {complaint}")
        if refusal.code == "VALIDATION_ERROR":
            raise RefusedError(f"{refusal.message}. {refusal.details}")
        raise EnvError(f"{where}: {refusal.code}: {complaint}")


async def _exchange(socket: ClientConnection, frame: str) -> str | bytes:
    # A full server says so and hangs up at once; what it said can still be read.
    with suppress(ConnectionClosed):
        await socket.send(frame)
    return await socket.recv()
