"""One MCP session over HTTP or stdio, held open by a task of its own.

A transport that breaks cancels the task that opened it. That must not be the task that runs the
episode, so a separate task opens the transport, waits, and closes it.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple, TextIO, TypeVar

import httpx
from pydantic import AnyUrl

from skyfleet.chat.message import ToolSpec
from skyfleet.envs.content_blocks import truncate
from skyfleet.envs.tls import tls_context
from skyfleet.errors import EnvError, MissingExtraError

try:
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
    from mcp import ClientSession, McpError, StdioServerParameters, stdio_client, types
    from mcp.client.streamable_http import streamable_http_client
    from mcp.shared.message import SessionMessage
    from mcp.types import INVALID_PARAMS
except ImportError:
    raise MissingExtraError("mcp", "mcp") from None

_CLOSE_SECONDS = 10
_MAX_ERROR_CHARACTERS = 1_000
_MAX_STDERR_CHARACTERS = 300

T = TypeVar("T")


class CallRejectedError(EnvError):
    """The server rejects the parameters of this call; the session continues."""


class Streams(NamedTuple):
    read: MemoryObjectReceiveStream[SessionMessage | Exception]
    write: MemoryObjectSendStream[SessionMessage]
    session_id: Callable[[], str | None]


Transport = Callable[[TextIO], AbstractAsyncContextManager[Streams]]
"""Takes the file for the stderr of a server that it starts."""


def over_http(url: str, headers: Mapping[str, str]) -> Transport:
    @asynccontextmanager
    async def transport(stderr: TextIO) -> AsyncIterator[Streams]:
        # No read timeout: every request has its own deadline.
        timeout = httpx.Timeout(_CLOSE_SECONDS, read=None)
        async with (
            httpx.AsyncClient(headers=headers, timeout=timeout, verify=tls_context()) as http,
            streamable_http_client(url, http_client=http) as streams,
        ):
            yield Streams(*streams)

    return transport


def over_stdio(command: Sequence[str], environment: Mapping[str, str]) -> Transport:
    program, *arguments = command
    server = StdioServerParameters(command=program, args=arguments, env=dict(environment))

    @asynccontextmanager
    async def transport(stderr: TextIO) -> AsyncIterator[Streams]:
        async with stdio_client(server, errlog=stderr) as (read, write):
            yield Streams(read, write, lambda: None)

    return transport


class Session:
    def __init__(self, name: str, transport: Transport, *, call_timeout_seconds: float) -> None:
        """Errors refer to the server by `name`."""
        self._name, self._transport, self._seconds = name, transport, call_timeout_seconds
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._closing = asyncio.Event()
        self._ready: asyncio.Future[ClientSession] = asyncio.Future()
        self.id: str | None = None
        """The session id of an HTTP server."""
        self.instructions = ""
        """The server's instructions for its clients."""
        self._keeper: asyncio.Task[None] | None = None

    async def open(self) -> None:
        self._keeper = asyncio.create_task(self._hold_open())
        await self._ask("initialize", lambda session: asyncio.sleep(0))

    async def list_tools(self) -> tuple[ToolSpec, ...]:
        listed = await self._ask("tools/list", _list_all_tools)
        return tuple(
            ToolSpec(
                name=tool.name, description=tool.description or "", parameters=tool.inputSchema
            )
            for tool in listed
        )

    async def call(self, name: str, arguments: Mapping[str, Any]) -> types.CallToolResult:
        # Not ClientSession.call_tool: it lists the tools again for an unknown name and raises if a
        # result does not match the output schema of the server.
        params = types.CallToolRequestParams(name=name, arguments=dict(arguments))
        request = types.ClientRequest(types.CallToolRequest(params=params))
        return await self._ask(
            f"tools/call {name}",
            lambda session: session.send_request(request, types.CallToolResult),
        )

    async def read(self, uri: str) -> types.ReadResourceResult:
        return await self._ask(
            f"resources/read {uri}", lambda session: session.read_resource(AnyUrl(uri))
        )

    async def close(self) -> None:
        self._closing.set()
        if self._keeper is not None:
            # A server that never answered `initialize` gets no time for a clean shutdown.
            seconds = _CLOSE_SECONDS if self._ready.done() else 0
            await asyncio.wait({self._keeper}, timeout=seconds)
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        self._stderr.close()

    async def _hold_open(self) -> None:
        async with AsyncExitStack() as stack:
            streams = await stack.enter_async_context(self._transport(self._stderr))
            session = await stack.enter_async_context(ClientSession(streams.read, streams.write))
            self.instructions = (await session.initialize()).instructions or ""
            self.id = streams.session_id()
            self._ready.set_result(session)
            await self._closing.wait()

    async def _ask(self, method: str, send: Callable[[ClientSession], Awaitable[T]]) -> T:
        """Return the server's answer; raise if the connection breaks or the time is over first."""
        if self._keeper is None:
            raise EnvError(f"{self._name}: no session is open; call reset first")

        async def send_when_ready() -> T:
            return await send(await asyncio.shield(self._ready))

        request_task = asyncio.create_task(send_when_ready())
        try:
            done, _ = await asyncio.wait(
                {request_task, self._keeper},
                timeout=self._seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            if not request_task.done():
                request_task.cancel()
                await asyncio.wait({request_task})
        if request_task in done and request_task.exception() is None:
            return request_task.result()
        where = f"{self._name}: {method}"
        if not done:
            raise EnvError(f"{where} not answered in {self._seconds:g} s (call_timeout_seconds)")
        error = _find_cause(
            request_task.exception() if request_task in done else self._keeper.exception()
        )
        if (
            request_task in done
            and isinstance(error, McpError)
            and error.error.code == INVALID_PARAMS
        ):
            raise CallRejectedError(str(error)) from error
        text = truncate(str(error), _MAX_ERROR_CHARACTERS)
        raise EnvError(f"{where}: {type(error).__name__}: {text}{self._format_stderr()}") from error

    def _format_stderr(self) -> str:
        self._stderr.seek(0)
        tail = self._stderr.read()[-_MAX_STDERR_CHARACTERS:].strip()
        return f"; its stderr ends with: {tail}" if tail else ""


async def _list_all_tools(session: ClientSession) -> list[types.Tool]:
    page = await session.list_tools()
    tools = list(page.tools)
    while page.nextCursor:
        params = types.PaginatedRequestParams(cursor=page.nextCursor)
        page = await session.list_tools(params=params)
        tools.extend(page.tools)
    return tools


def _find_cause(error: BaseException | None) -> BaseException | None:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
