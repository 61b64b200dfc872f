"""The WebSocket session of one OpenEnv episode, with a deadline on every wait.

The server keeps one environment per socket, so a lost socket loses the state: the client
reconnects only until the first reset has been answered.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from random import uniform
from time import monotonic
from typing import Any, Literal

from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from skyfleet.config.environment import OpenEnv
from skyfleet.envs.content_blocks import truncate
from skyfleet.envs.tls import tls_context
from skyfleet.errors import ConfigError, EnvError, MissingExtraError

try:
    from websockets.asyncio.client import ClientConnection, connect
    from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
except ImportError:
    raise MissingExtraError("websockets", "openenv") from None

_CLOSE_SECONDS = 2.0
_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.05, 2.0
_MESSAGE_TOO_BIG = 1009
"""The WebSocket close code."""
_MAX_ERROR_CHARACTERS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEnvSettings:
    base_url: str
    """http or https; the socket is its /ws."""
    connect_timeout_seconds: float = 10
    message_timeout_seconds: float = 60
    capacity_wait_seconds: float = 300
    """How long to retry a server that is full, restarting or not up yet."""
    max_frame_bytes: int = 100 * 2**20
    max_result_characters: int = 20_000
    """A longer tool result is cut, with a note."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Sent with the opening request of the socket, such as a bearer token."""

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"base_url={self.base_url!r}; write http://host:port")

    @classmethod
    def from_config(cls, section: OpenEnv) -> OpenEnvSettings:
        if section.base_url is None:
            raise ConfigError("environment.openenv.base_url is not set; write http://host:port")
        return cls(
            base_url=section.base_url,
            headers={name: value.get_secret_value() for name, value in section.headers.items()},
            message_timeout_seconds=section.message_timeout_seconds,
            capacity_wait_seconds=section.capacity_wait_seconds,
        )

    def url(self, path: str) -> str:
        return self.base_url.rstrip("/") + path


class StepResult(BaseModel):
    """The server's observation after a reset or a step."""

    observation: dict[str, Any]
    reward: FiniteFloat | None = None
    done: bool = False

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.observation.get("metadata") or {}


class _ErrorData(BaseModel):
    message: str = ""
    code: str = ""
    errors: list[dict[str, Any]] = Field(default_factory=list)

    @property
    def details(self) -> str:
        invalid = [(error.get("loc") or ["?"], error.get("msg")) for error in self.errors]
        return "; ".join(f"{'.'.join(map(str, place))}: {what}" for place, what in invalid)


class _Frame(BaseModel):
    type: str
    data: dict[str, Any] = Field(default_factory=dict)


class ActionRejectedError(EnvError):
    """The server rejects this action as invalid; the session continues."""


class _SessionLostError(EnvError):
    """No session could be opened; a retry may succeed."""


class Session:
    def __init__(self, settings: OpenEnvSettings) -> None:
        self._settings = settings
        self._socket: ClientConnection | None = None

    async def open(self, reset: Mapping[str, Any]) -> StepResult:
        """Connect and reset."""
        wait_seconds = self._settings.capacity_wait_seconds
        deadline, pause = monotonic() + wait_seconds, _FIRST_PAUSE_SECONDS
        while True:
            try:
                self._socket = await self._connect()
                return await self.ask("reset", reset)
            except _SessionLostError as error:
                await self.close()
                if monotonic() + pause > deadline:
                    raise EnvError(f"{error}; tried for {wait_seconds:g} s") from error
            await asyncio.sleep(uniform(pause / 2, pause))
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)

    async def ask(self, kind: Literal["reset", "step"], data: Mapping[str, Any]) -> StepResult:
        """Send one frame and return its answer.

        A wait that fails or is cancelled drops the socket: the late answer would be taken for that
        of the next frame.
        """
        if self._socket is None:
            raise EnvError(f"{self._settings.base_url}: no session is open; call reset first")
        frame = json.dumps({"type": kind, "data": dict(data)})
        try:
            async with asyncio.timeout(self._settings.message_timeout_seconds):
                raw = await _exchange(self._socket, frame)
        except (TimeoutError, ConnectionClosed) as error:
            self._drop()
            raise self._make_error(kind, error) from error
        except BaseException:
            self._drop()
            raise
        return self._parse(kind, raw)

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
        """Abort without a closing handshake: a cancelled task must not wait for one."""
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.transport.abort()

    async def _connect(self) -> ClientConnection:
        url = self._settings.url("/ws").replace("http", "ws", 1)
        try:
            return await connect(
                url,
                ssl=tls_context() if url.startswith("wss") else None,
                open_timeout=self._settings.connect_timeout_seconds,
                close_timeout=_CLOSE_SECONDS,
                max_size=self._settings.max_frame_bytes,
                additional_headers=self._settings.headers,
                # Every answer has a deadline, so a late pong adds no information.
                ping_timeout=None,
            )
        except InvalidStatus as error:
            kind = _SessionLostError if error.response.status_code >= 500 else EnvError
            raise kind(f"{url}: answers HTTP {error.response.status_code}") from error
        except (OSError, InvalidHandshake, EOFError) as error:
            raise _SessionLostError(f"{url}: {error or type(error).__name__}") from error

    def _make_error(self, kind: str, error: TimeoutError | ConnectionClosed) -> EnvError:
        where = f"{self._settings.base_url}: {kind}"
        if isinstance(error, TimeoutError):
            seconds = self._settings.message_timeout_seconds
            return EnvError(f"{where} not answered in {seconds:g} s (message_timeout_seconds)")
        if error.sent is not None and error.sent.code == _MESSAGE_TOO_BIG:
            size = self._settings.max_frame_bytes
            return EnvError(f"{where}: the answer is over max_frame_bytes={size}")
        lost = _SessionLostError if kind == "reset" else EnvError
        return lost(f"{where}: the socket closed, {error}")

    def _parse(self, kind: str, raw: str | bytes) -> StepResult:
        where = f"{self._settings.base_url}: {kind}"
        try:
            frame = _Frame.model_validate_json(raw)
            if frame.type == "observation":
                return StepResult.model_validate(frame.data)
            failure = _ErrorData.model_validate(frame.data)
        except ValidationError as error:
            raise EnvError(f"{where}: answered {raw[:80]!r}, which is no OpenEnv frame") from error
        text = truncate(failure.message, _MAX_ERROR_CHARACTERS)
        if failure.code == "CAPACITY_REACHED":
            raise _SessionLostError(f"{where}: {text}")
        if failure.code == "VALIDATION_ERROR":
            raise ActionRejectedError(f"{failure.message}. {failure.details}")
        raise EnvError(f"{where}: {failure.code}: {text}")


async def _exchange(socket: ClientConnection, frame: str) -> str | bytes:
    # A full server sends an error and closes at once; the error can still be read.
    with suppress(ConnectionClosed):
        await socket.send(frame)
    return await socket.recv()
