"""Make calls fail at random: an environment's methods, an engine, the disk under a folder, HTTP requests.

`benchmarks/soak.py` installs them in the process that trains, and in front of the server it plays on.
"""

from __future__ import annotations

import asyncio
import builtins
import errno
import io
import os
import random
import socket
import struct
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from starlette.responses import Response

RAISED = (RuntimeError, ValueError, KeyError, TimeoutError, ConnectionResetError)
"""What an environment may raise."""
DISK_ERRORS = (errno.EIO, errno.ENOSPC)
ANSWERS = ("500", "429", "reset", "cut", "silence")
LONGEST_BURST = 20
"""Calls of the disk fail in bursts of 1 to so many, as those of a full or broken disk do; a burst goes
on in the next process. If each call failed on its own, a checkpoint of 35 calls would be saved in one
of six attempts."""
SILENCE_SECONDS = 2.0
"""Then the connection is reset, as a proxy does with an idle one."""


class Faults:
    """Counts calls by kind, and chooses the ones that fail."""

    def __init__(self, rate: float, seed: str, burst_left: int = 0) -> None:
        self.rate, self.random = rate, random.Random(seed)
        self.burst_left = burst_left
        """Calls of the disk that fail next."""
        self.calls: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()

    def fails(self, kind: str) -> bool:
        self.calls[kind] += 1
        failed = self.random.random() < self.rate
        self.failures[kind] += failed
        return failed

    def fails_in_burst(self, kind: str) -> bool:
        self.calls[kind] += 1
        mean_length = (1 + LONGEST_BURST) / 2
        if not self.burst_left and self.random.random() < self.rate / (1 - self.rate) / mean_length:
            self.burst_left = self.random.randint(1, LONGEST_BURST)
        failed = self.burst_left > 0
        self.burst_left -= failed
        self.failures[kind] += failed
        return failed

    def install(self, folder: Path) -> None:
        """In this process: the world's environments, the engine, and the disk under `folder`."""
        from skyfleet.engines.embedded import EmbeddedEngine
        from skyfleet.errors import EngineError
        from skyfleet.worlds.env import WorldEnv

        for name in ("reset", "step", "grade"):
            self._wrap_method(WorldEnv, name, f"environment {name}", self._env_error)
        self._wrap_method(
            EmbeddedEngine, "generate", "engine generate", lambda: EngineError("injected failure")
        )
        self._install_disk(folder.resolve())

    def _env_error(self) -> Exception:
        return self.random.choice(RAISED)("injected failure")

    def _wrap_method(
        self, owner: type, name: str, kind: str, error: Callable[[], Exception]
    ) -> None:
        call = getattr(owner, name)

        @wraps(call)
        async def fail_or_call(*arguments: Any, **named: Any) -> Any:
            if self.fails(kind):
                raise error()
            return await call(*arguments, **named)

        setattr(owner, name, fail_or_call)

    def _install_disk(self, folder: Path) -> None:
        fsync, replace, rename, open_file = os.fsync, os.replace, os.rename, io.open

        def faulty_fsync(fd: Any) -> None:
            number = fd if isinstance(fd, int) else fd.fileno()
            if _is_inside(os.readlink(f"/proc/self/fd/{number}"), folder):
                self.check_disk("fsync")  # the system names no file either
            fsync(fd)

        def faulty_move(move: Callable[..., None]) -> Callable[..., None]:
            def moved(source: Any, target: Any, **named: Any) -> None:
                if _is_inside(target, folder):
                    self.check_disk("rename", source, target)
                move(source, target, **named)

            return moved

        def faulty_open(file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
            is_written = not set(mode).isdisjoint("wax") and "+" not in mode
            if not is_written or isinstance(file, int) or not _is_inside(file, folder):
                return open_file(file, mode, *arguments, **named)
            self.check_disk("open", file)
            return self._open_written(file, mode, *arguments, **named)

        os.fsync, os.replace, os.rename = faulty_fsync, faulty_move(replace), faulty_move(rename)
        io.open = builtins.open = faulty_open

    def _open_written(
        self,
        file: Any,
        mode: str,
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
    ) -> Any:
        buffered = io.BufferedWriter(
            _FaultyFile(self, file, mode.replace("b", "").replace("t", ""))
        )
        if "b" in mode:
            return buffered
        return io.TextIOWrapper(buffered, encoding or "utf-8", errors, newline, buffering == 1)

    def check_disk(self, call: str, *names: Any) -> None:
        if self.fails_in_burst(f"disk {call}"):
            number = self.random.choice(DISK_ERRORS)
            raise OSError(number, os.strerror(number), *(os.fspath(name) for name in names[:1]))


class _FaultyFile(io.FileIO):
    """A file whose writes to the disk may fail; what is still buffered is not written yet."""

    def __init__(self, faults: Faults, name: Any, mode: str) -> None:
        super().__init__(name, mode)
        self._faults = faults

    def write(self, data: Any) -> int:
        self._faults.check_disk("write")
        return super().write(data) or 0


def _is_inside(path: Any, folder: Path) -> bool:
    return Path(os.path.abspath(os.fsdecode(path))).is_relative_to(folder)


class FaultyNetwork:
    """An ASGI app behind a network that is not to be relied on. Must be uvicorn's outermost app."""

    def __init__(self, app: Any, faults: Faults) -> None:
        self._app, self._faults = app, faults

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not self._faults.fails("network request"):
            await self._app(scope, receive, send)
            return
        answer = self._faults.random.choice(ANSWERS)
        self._faults.failures[f"network {answer}"] += 1
        if answer in ("500", "429"):
            await Response("injected failure", int(answer))(scope, receive, send)
        elif answer == "cut":
            # The work is done, and half of the answer arrives.
            await self._app(scope, receive, _half(send))
            await _reset(send)
        else:
            await asyncio.sleep(SILENCE_SECONDS if answer == "silence" else 0)
            await _reset(send)


def _half(send: Any) -> Any:
    async def send_half(message: Any) -> None:
        if message["type"] == "http.response.body":
            body = message.get("body", b"")
            message = {**message, "body": body[: len(body) // 2], "more_body": True}
        await send(message)

    return send_half


async def _reset(send: Any) -> None:
    transport = send.__self__.transport
    if (connected := transport.get_extra_info("socket")) is not None:
        linger = struct.pack("ii", 1, 0)  # closing sends RST
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    transport.abort()
    await asyncio.sleep(0.01)  # uvicorn answers with 500 unless it has seen the end by now
