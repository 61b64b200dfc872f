"""Loopback: an app on a free port of this machine, inside a process that has other things to do."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from skyfleet.errors import MissingExtraError

try:
    import uvicorn
except ImportError:
    raise MissingExtraError("uvicorn", "serve") from None


class Loopback(uvicorn.Server):
    def __init__(self, app: Any) -> None:
        super().__init__(
            uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=1)
        )
        self._stopping = asyncio.Event()
        # asyncio sends small answers at once only on a socket that says it is TCP; 40 ms each, else.
        self._listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._listening.bind(("127.0.0.1", 0))
        # Before uvicorn has started, so that nobody need wait for that.
        self._listening.listen(1024)
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._serving = asyncio.create_task(self.serve(sockets=[self._listening]))

    @property
    def has_ended(self) -> bool:
        """With the event loop that it was made in, say."""
        return self._serving.done()

    async def stop(self) -> None:
        """Cuts whoever is still connected."""
        self._stopping.set()
        await self._serving
        self._listening.close()

    async def main_loop(self) -> None:
        await self._stopping.wait()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ctrl-C stays with the process."""
        yield
