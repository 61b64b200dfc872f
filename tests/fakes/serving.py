"""Serving: any ASGI app on a free port of this machine, and nothing left of it afterwards."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import uvicorn


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stopping = asyncio.Event()

    async def main_loop(self) -> None:
        await self.stopping.wait()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals stay with pytest."""
        yield


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    """The base URL, without a slash at its end. Leaving cuts whoever is still connected."""
    config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=1)
    # asyncio sends small answers at once only on a socket that says it is TCP; 40 ms each, else.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listening:
        listening.bind(("127.0.0.1", 0))
        # Before uvicorn has started, so that nobody need wait for that.
        listening.listen()
        server = _Server(config)
        task = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.stopping.set()
            await task


@asynccontextmanager
async def nothing_left(within_seconds: float = 3) -> AsyncIterator[None]:
    """Fails unless every task, thread, file, socket and process begun in here soon ends."""
    before = _held()
    yield
    for _ in range(int(within_seconds / 0.02)):
        if not (left := _held() - before):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"left behind: {sorted(left)}")


def _held() -> Counter[str]:
    tasks = [repr(task) for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    threads = [repr(thread) for thread in threading.enumerate()]
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    files = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the folder being listed was one of them
            files.append(os.readlink(f"/proc/self/fd/{number}"))
    return Counter([*tasks, *threads, *files, *(f"process {pid}" for pid in children)])
