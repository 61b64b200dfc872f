"""Jail: runs verifiers that strangers wrote, each in a process that can do nothing but judge.

Workers stay; every verification is a fork of one. Whatever a verifier does to its own process,
the next verification starts from a clean one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self
from weakref import WeakKeyDictionary

import skyfleet
from skyfleet.envs.verifiers import seccomp
from skyfleet.envs.verifiers.jail_protocol import (
    MAX_REPLY_BYTES,
    SIZE,
    Question,
    framed,
    pack_request,
    read_reply,
)
from skyfleet.errors import VerifierError
from skyfleet.tasks.task import Grade

_PACKAGE = Path(skyfleet.__file__).parent
_PYTHON = os.path.realpath(sys.executable)
_MAIN = (
    "import sys; sys.path.append({root!r}); "
    "from skyfleet.envs.verifiers.jail_worker import main; main()"
)
_LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache")


def plain_command() -> list[str]:
    """Behind limits and the filter only."""
    return _python(_PACKAGE.parent)


def walled_command(bwrap: str) -> list[str]:
    """Behind bubblewrap: Python's own files, read-only, and nothing else of this machine."""
    needed = dict.fromkeys([*_LIBRARIES, f"{sys.base_prefix}/lib", _PYTHON])
    binds = [word for path in needed for word in ("--ro-bind-try", path, path)]
    namespaces = ["--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534"]
    manners = ["--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"]
    package = ["--ro-bind", str(_PACKAGE), "/jail/skyfleet", "--dev-bind", os.devnull, os.devnull]
    closed = ["--remount-ro", "/", "--chdir", "/", "--"]
    return [bwrap, *namespaces, *manners, *binds, *package, *closed, *_python(Path("/jail"))]


def _python(root: Path) -> list[str]:
    # -I and -S: neither the environment nor an installed package has a say in how it starts.
    return [_PYTHON, "-I", "-S", "-B", "-c", _MAIN.format(root=str(root))]


class JailProcess:
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
                    # Control-C is for the run, which may still want to grade what it has.
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
        """The reply. An OSError, or a cancellation, leaves a worker that nobody should ask again."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await asyncio.get_running_loop().sock_sendall(self._socket, framed(request))
                (size,) = SIZE.unpack(await self._read(SIZE.size))
                if size > MAX_REPLY_BYTES:
                    raise ConnectionError(f"it announces {size} bytes")
                return await self._read(size)
        except ConnectionError as error:
            raise ConnectionError(self._last_words() or str(error)) from error
        except TimeoutError:
            raise TimeoutError(f"no answer within {timeout_seconds:g} s") from None

    async def _read(self, size: int) -> bytes:
        loop, content = asyncio.get_running_loop(), b""
        while len(content) < size:
            chunk = await loop.sock_recv(self._socket, size - len(content))
            if not chunk:
                raise ConnectionError("it is gone")
            content += chunk
        return content

    def _last_words(self) -> str:
        """The last line of what it wrote to stderr."""
        stderr = self._process.stderr
        assert stderr is not None
        os.set_blocking(stderr.fileno(), False)
        lines = (stderr.read() or b"").decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def interrupt(self) -> None:
        """Whoever waits for its reply learns that it is gone."""
        self._process.kill()

    def end(self) -> None:
        """Nothing of it is left. Safe to call twice."""
        self._process.kill()
        self._process.wait()
        self._socket.close()
        if self._process.stderr is not None:
            self._process.stderr.close()


logger = logging.getLogger(__name__)

_START_SECONDS = 60.0
_GRACE_SECONDS = 10.0
"""A worker ends its child in time; one that does not is ended itself so much later."""

_GREETING = pack_request(
    Question(
        code="def verify(env): return 1",
        final_answer=None,
        conversation=None,
        partial_credit=False,
        timeout_seconds=_START_SECONDS,
    ),
    seed=b"",
    current=b"",
)


class Jail:
    """Use it from any event loop, one after another or at once; close it when no more is graded."""

    def __init__(self, *, n_workers: int | None = None, bwrap: str = "bwrap") -> None:
        self._n_workers = n_workers or os.cpu_count() or 1
        self._bwrap = shutil.which(bwrap)
        if self._bwrap is None:
            _warn(f"{bwrap} is not installed")
        if not seccomp.SUPPORTED:
            logger.warning(
                "verifiers run without a filter of system calls: there is none for %s yet",
                platform.machine(),
            )
        self._walls_hold = False
        self._closed = False
        self._idle: list[JailProcess] = []
        self._busy: set[JailProcess] = set()
        self._owner_pid = os.getpid()
        self._gates: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            WeakKeyDictionary()
        )

    async def verify(
        self,
        code: str,
        seed: bytes,
        current: bytes,
        final_answer: str | None,
        conversation: str | None = None,
        *,
        partial_credit: bool = False,
        timeout_seconds: float = 30.0,
    ) -> Grade:
        """As `run_verifier`, on two database images. VerifierError also for what was not allowed."""
        question = Question(
            code=code,
            final_answer=final_answer,
            conversation=conversation,
            partial_credit=partial_credit,
            timeout_seconds=timeout_seconds,
        )
        request = pack_request(question, seed, current)
        async with self._gate():
            worker = await self._hire()
            reply = await self._ask(worker, request, timeout_seconds + _GRACE_SECONDS)
        return read_reply(reply)

    @property
    def pids(self) -> list[int]:
        """Of the workers."""
        return [worker.pid for worker in (*self._idle, *self._busy)]

    def close(self) -> None:
        """No process is left. Verifications under way end as unknown, and no more begin."""
        self._closed = True
        self._forget_after_fork()
        for worker in self._busy:
            worker.interrupt()
        while self._idle:
            self._idle.pop().end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _gate(self) -> asyncio.Semaphore:
        """A semaphore belongs to one loop, and every asyncio.run has its own."""
        loop = asyncio.get_running_loop()
        return self._gates.setdefault(loop, asyncio.Semaphore(self._n_workers))

    async def _ask(self, worker: JailProcess, request: bytes, timeout_seconds: float) -> bytes:
        self._busy.add(worker)
        answered = False
        try:
            reply = await worker.ask(request, timeout_seconds)
            answered = True
        except OSError as error:
            raise VerifierError(
                f"the jail's worker failed ({error}); "
                "the grade is unknown, another worker takes its place"
            ) from error
        finally:
            self._busy.discard(worker)
            if answered and worker.alive and not self._closed:
                self._idle.append(worker)
            else:
                worker.end()
        return reply

    async def _hire(self) -> JailProcess:
        if self._closed:
            raise VerifierError("the jail is closed, so the grade is unknown; open another Jail")
        self._forget_after_fork()
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                return worker
            worker.end()
        try:
            return await self._start()
        except OSError as error:
            raise VerifierError(
                f"the jail cannot be opened ({error}); the grade is unknown"
            ) from error

    async def _start(self) -> JailProcess:
        bwrap = self._bwrap
        if bwrap is not None:
            try:
                worker = await _started(walled_command(bwrap))
            except ConnectionError as error:
                # Walls that held once and do not now are an accident, not a reason to do without.
                if self._walls_hold:
                    raise
                if self._bwrap is not None:
                    self._bwrap = None
                    _warn(str(error))
            else:
                self._walls_hold = True
                return worker
        return await _started(plain_command())

    def _forget_after_fork(self) -> None:
        """The workers of the process that this one was forked from are not its own."""
        if self._owner_pid != os.getpid():
            self._owner_pid = os.getpid()
            self._idle, self._busy = [], set()


async def _started(command: list[str]) -> JailProcess:
    """A worker that has answered once, so whoever is hired afterwards works."""
    worker = JailProcess(command)
    try:
        read_reply(await worker.ask(_GREETING, _START_SECONDS))
    except BaseException:
        worker.end()
        raise
    return worker


def _warn(reason: str) -> None:
    logger.warning(
        "VERIFIERS RUN OUTSIDE A SANDBOX: %s. Limits%s remain. "
        "Install bubblewrap (apt install bubblewrap) and allow unprivileged user namespaces "
        "before tasks of strangers are graded.",
        reason,
        " and a filter of system calls" if seccomp.SUPPORTED else "",
    )
