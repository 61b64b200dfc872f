"""BrokenHttp: a server on real loopback sockets that answers as a behaviour decides, byte by byte."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from tests.fakes.chars import END
from tests.fakes.counter_env import PRESS

BROKEN, GOOD = "broken", "good"
"""The first word of a prompt: the behaviour answers broken ones, good ones get a good answer."""
MODEL = "policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    path: str
    body: dict[str, Any]
    number: int
    """How many broken requests the server had before."""

    @property
    def text(self) -> str:
        """All that the agent has seen."""
        prompt = self.body.get("prompt")
        if isinstance(prompt, list):
            return "".join(map(chr, prompt))
        return json.dumps([self.body.get("system"), self.body.get("messages")])

    @property
    def is_last_turn(self) -> bool:
        return "press" in self.text


class Connection:
    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def respond(
        self, body: bytes, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        given = {"Content-Type": "application/json", "Content-Length": str(len(body))}
        lines = [f"{name}: {value}" for name, value in (given | dict(headers or {})).items()]
        head = "\r\n".join([f"HTTP/1.1 {status} Status", *lines, "", ""])
        await self.send(head.encode("latin-1") + body)

    async def drip(self, data: bytes, *, seconds: float) -> None:
        """One byte after the other."""
        for byte in data:
            await self.send(bytes([byte]))
            await asyncio.sleep(seconds)

    async def hang(self) -> None:
        await asyncio.sleep(3600)

    def reset(self) -> None:
        """Close with RST instead of FIN."""
        sock = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()


Behaviour = Callable[[HttpRequest, Connection], Awaitable[bool | None]]
"""Answers a broken request; True keeps the connection open."""


class BrokenHttp:
    def __init__(self, behave: Behaviour, *, accepts: bool = True) -> None:
        """`accepts=False` calls `behave` for every new connection, before any request."""
        self._behave, self._accepts = behave, accepts
        self.n_broken = 0
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections[asyncio.create_task(self._serve(reader, writer))] = writer

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                connection = Connection(writer)
                if not self._accepts:
                    await self._behave(HttpRequest(path="", body={}, number=0), connection)
                while self._accepts and await self._answer(await _read(reader), connection):
                    pass
        finally:
            self._connections.pop(task, None)
            writer.close()

    async def _answer(self, received: tuple[str, dict[str, Any]], connection: Connection) -> bool:
        path, body = received
        request = HttpRequest(path=path, body=body, number=self.n_broken)
        if path.endswith("/models"):
            await connection.respond(json.dumps({"data": [{"id": MODEL}]}).encode())
            return True
        if not body:
            await connection.respond(b"no such route", 404)
            return True
        if GOOD in request.text:
            await connection.respond(json.dumps(good_answer(request)).encode())
            return True
        self.n_broken += 1
        return bool(await self._behave(request, connection))

    async def close(self) -> None:
        for _ in range(5):  # connections that were accepted already come in these turns
            await asyncio.sleep(0)
        connections = dict(self._connections)
        for task, writer in connections.items():
            task.cancel()
            writer.close()  # a task that has not started does not do it
        await asyncio.gather(*connections, return_exceptions=True)


async def _read(reader: asyncio.StreamReader) -> tuple[str, dict[str, Any]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    path = head.split(" ")[1]
    lines = [line.partition(":") for line in head.split("\r\n")[1:]]
    length = next((int(value) for name, _, value in lines if name.lower() == "content-length"), 0)
    return path, json.loads(await reader.readexactly(length)) if length else {}


@asynccontextmanager
async def broken_http(behave: Behaviour, *, accepts: bool = True) -> AsyncIterator[str]:
    """The root URL of a server that answers broken prompts with `behave`."""
    server = BrokenHttp(behave, accepts=accepts)
    listening = await asyncio.start_server(server.handle, "127.0.0.1", 0, limit=1 << 22)
    try:
        host, port = listening.sockets[0].getsockname()
        yield f"http://{host}:{port}"
    finally:
        listening.close()
        await server.close()


def good_answer(request: HttpRequest) -> dict[str, Any]:
    """What a healthy server answers: press by three, then stop. The path decides the format."""
    line = "done" if request.is_last_turn else PRESS % 3
    token_ids = [*map(ord, line), END]
    logprobs = [-0.5] * len(token_ids)
    arguments = {} if request.is_last_turn else {"by": 3}
    if request.path.endswith("/messages"):
        use = {"type": "tool_use", "id": "0", "name": "press", "input": arguments}
        block = {"type": "text", "text": line} if request.is_last_turn else use
        return {"content": [block], "stop_reason": "end_turn"}
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "token_ids": token_ids}
    answer = {"id": "1", "object": "completion", "model": MODEL, "choices": [choice]}
    if request.path.endswith("/chat/completions"):
        message: dict[str, Any] = {"role": "assistant", "content": line}
        if not request.is_last_turn:
            function = {"name": "press", "arguments": json.dumps(arguments)}
            message |= {"content": None, "tool_calls": [{"id": "0", "function": function}]}
        choice["message"] = message
        choice["logprobs"] = {"content": [{"token": "?", "logprob": p} for p in logprobs]}
        return answer | {"prompt_token_ids": [*map(ord, request.text)]}
    choice |= {"text": line, "logprobs": {"token_logprobs": logprobs}}
    choice["prompt_token_ids"] = request.body["prompt"]
    return answer


@contextmanager
def broken_http_thread(behave: Behaviour, *, accepts: bool = True) -> Iterator[str]:
    """The same in a thread, for a command that runs its own event loop."""
    started: Future[str] = Future()
    loop = asyncio.new_event_loop()
    ended = asyncio.Event()

    async def serve() -> None:
        async with broken_http(behave, accepts=accepts) as url:
            started.set_result(url)
            await ended.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        yield started.result(timeout=10)
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()
