"""Session: one MCP session over HTTP or stdio, kept by a task of its own.

A transport that breaks cancels the task that opened it. That must not be the one that plays the
episode, so another task opens it, waits, and closes it.
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
from skyfleet.envs.content_blocks import shortened
from skyfleet.envs.tls import certificates
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
_COMPLAINT_CHARACTERS = 1_000
_LAST_WORDS_CHARACTERS = 300

T = TypeVar("T")


class RefusedError(EnvError):
    """The server does not take this call; the session goes on."""


class Wire(NamedTuple):
    read: MemoryObjectReceiveStream[SessionMessage | Exception]
    write: MemoryObjectSendStream[SessionMessage]
    session_id: Callable[[], str | None]


Transport = Callable[[TextIO], AbstractAsyncContextManager[Wire]]
"""Takes the file that a server of our own starting writes its complaints to."""


def over_http(url: str, headers: Mapping[str, str]) -> Transport:
    @asynccontextmanager
    async def transport(complaints: TextIO) -> AsyncIterator[Wire]:
        # Reading has no limit here: every request has a deadline already.
        timeout = httpx.Timeout(_CLOSE_SECONDS, read=None)
        async with (
            httpx.AsyncClient(headers=headers, timeout=timeout, verify=certificates()) as http,
            streamable_http_client(url, http_client=http) as wire,
        ):
            yield Wire(*wire)

    return transport


def over_stdio(command: Sequence[str], environment: Mapping[str, str]) -> Transport:
    program, *arguments = command
    server = StdioServerParameters(command=program, args=arguments, env=dict(environment))

    @asynccontextmanager
    async def transport(complaints: TextIO) -> AsyncIterator[Wire]:
        async with stdio_client(server, errlog=complaints) as (read, write):
            yield Wire(read, write, lambda: None)

    return transport


class Session:
    def __init__(self, name: str, transport: Transport, *, call_timeout_seconds: float) -> None:
        """`name` is what errors call the server."""
        self._name, self._transport, self._seconds = name, transport, call_timeout_seconds
        self._complaints = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._closing = asyncio.Event()
        self._ready: asyncio.Future[ClientSession] = asyncio.Future()
        self.id: str | None = None
        """What an HTTP server calls this session."""
        self.instructions = ""
        """What the server tells its clients."""
        self._keeper: asyncio.Task[None] | None = None

    async def open(self) -> None:
        self._keeper = asyncio.create_task(self._keep())
        await self._asked("initialize", lambda session: asyncio.sleep(0))

    async def tools(self) -> tuple[ToolSpec, ...]:
        listed = await self._asked("tools/list", _all_tools)
        return tuple(
            ToolSpec(
                name=tool.name, description=tool.description or "", parameters=tool.inputSchema
            )
            for tool in listed
        )

    async def call(self, name: str, arguments: Mapping[str, Any]) -> types.CallToolResult:
        # Not ClientSession.call_tool: it lists the tools anew for a name it does not know, and
        # ends in an error where a result does not fit the schema that the server gave for it.
        params = types.CallToolRequestParams(name=name, arguments=dict(arguments))
        request = types.ClientRequest(types.CallToolRequest(params=params))
        return await self._asked(
            f"tools/call {name}",
            lambda session: session.send_request(request, types.CallToolResult),
        )

    async def read(self, uri: str) -> types.ReadResourceResult:
        return await self._asked(
            f"resources/read {uri}", lambda session: session.read_resource(AnyUrl(uri))
        )

    async def close(self) -> None:
        self._closing.set()
        if self._keeper is not None:
            # Whoever has not answered the first message is not told goodbye either.
            seconds = _CLOSE_SECONDS if self._ready.done() else 0
            await asyncio.wait({self._keeper}, timeout=seconds)
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        self._complaints.close()

    async def _keep(self) -> None:
        async with AsyncExitStack() as stack:
            wire = await stack.enter_async_context(self._transport(self._complaints))
            session = await stack.enter_async_context(ClientSession(wire.read, wire.write))
            self.instructions = (await session.initialize()).instructions or ""
            self.id = wire.session_id()
            self._ready.set_result(session)
            await self._closing.wait()

    async def _asked(self, doing: str, ask: Callable[[ClientSession], Awaitable[T]]) -> T:
        """What the server answers, unless it vanishes or the time is over first."""
        if self._keeper is None:
            raise EnvError(f"{self._name}: no session is open; call reset first")

        async def asked() -> T:
            return await ask(await asyncio.shield(self._ready))

        asking = asyncio.create_task(asked())
        try:
            done, _ = await asyncio.wait(
                {asking, self._keeper}, timeout=self._seconds, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            if not asking.done():
                asking.cancel()
                await asyncio.wait({asking})
        if asking in done and asking.exception() is None:
            return asking.result()
        where = f"{self._name}: {doing}"
        if not done:
            raise EnvError(f"{where} not answered in {self._seconds:g} s (call_timeout_seconds)")
        error = _cause(asking.exception() if asking in done else self._keeper.exception())
        if asking in done and isinstance(error, McpError) and error.error.code == INVALID_PARAMS:
            raise RefusedError(str(error)) from error
        complaint = shortened(str(error), _COMPLAINT_CHARACTERS)
        raise EnvError(
            f"{where}: {type(error).__name__}: {complaint}{self._last_words()}"
        ) from error

    def _last_words(self) -> str:
        self._complaints.seek(0)
        words = self._complaints.read()[-_LAST_WORDS_CHARACTERS:].strip()
        return f"; its last words: {words}" if words else ""


async def _all_tools(session: ClientSession) -> list[types.Tool]:
    page = await session.list_tools()
    tools = list(page.tools)
    while page.nextCursor:
        params = types.PaginatedRequestParams(cursor=page.nextCursor)
        page = await session.list_tools(params=params)
        tools.extend(page.tools)
    return tools


def _cause(error: BaseException | None) -> BaseException | None:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
