"""A worker process of the jail, seen from outside."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Sequence

from skyfleet.envs.verifiers.jail_protocol import MAX_REPLY_BYTES, SIZE, pack_frame


class JailProcess:
    """A worker process, which answers one request at a time."""

    def __init__(self, command: Sequence[str]) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    env={},
                    # Control-C goes to the run, which may still want to grade what it has.
                    start_new_session=True,
                )
        except OSError:
            self._socket.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    async def ask(self, request: bytes, timeout_seconds: float) -> bytes:
        """Return the reply. After an OSError or a cancellation the worker must not be reused."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await asyncio.get_running_loop().sock_sendall(self._socket, pack_frame(request))
                (size,) = SIZE.unpack(await self._read(SIZE.size))
                if size > MAX_REPLY_BYTES:
                    raise ConnectionError(f"it announces {size} bytes")
                return await self._read(size)
        except ConnectionError as error:
            raise ConnectionError(self._read_last_stderr_line() or str(error)) from error
        except TimeoutError:
            raise TimeoutError(f"no answer within {timeout_seconds:g} s") from None

    async def _read(self, size: int) -> bytes:
        loop, content = asyncio.get_running_loop(), b""
        while len(content) < size:
            chunk = await loop.sock_recv(self._socket, size - len(content))
            if not chunk:
                raise ConnectionError("the process has ended")
            content += chunk
        return content

    def _read_last_stderr_line(self) -> str:
        stderr = self._process.stderr
        assert stderr is not None
        os.set_blocking(stderr.fileno(), False)
        lines = (stderr.read() or b"").decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def interrupt(self) -> None:
        """Kill the process; whoever waits for its reply gets a ConnectionError."""
        self._process.kill()

    def end(self) -> None:
        """Kill the process and release its resources. Safe to call twice."""
        self._process.kill()
        self._process.wait()
        self._socket.close()
        if self._process.stderr is not None:
            self._process.stderr.close()
