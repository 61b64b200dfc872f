"""Run untrusted verifiers in sandboxed worker processes.

Workers persist; each forks a child per verification. Whatever a verifier does to its own process,
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
    VerifyRequest,
    pack_frame,
    pack_request,
    unpack_reply,
)
from skyfleet.envs.verifiers.running import SUCCESS_REWARD
from skyfleet.errors import VerifierError
from skyfleet.tasks.task import Grade

logger = logging.getLogger(__name__)

_START_SECONDS = 60.0
_GRACE_SECONDS = 10.0
"""A worker kills its child at the timeout; a worker that does not is killed this much later."""

_PROBE = pack_request(
    VerifyRequest(
        code="def verify(env): return 1",
        final_answer=None,
        conversation=None,
        partial_credit=False,
        timeout_seconds=_START_SECONDS,
    ),
    seed=b"",
    current=b"",
)

_PACKAGE = Path(skyfleet.__file__).parent
_PYTHON = os.path.realpath(sys.executable)
_MAIN = (
    "import sys; sys.path.append({root!r}); "
    "from skyfleet.envs.verifiers.jail_worker import main; main()"
)
_LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache")


class Jail:
    """A pool of workers for any number of event loops; close it when no more is graded."""

    def __init__(self, *, n_workers: int | None = None, bwrap: str = "bwrap") -> None:
        self._n_workers = n_workers or os.cpu_count() or 1
        self._bwrap = shutil.which(bwrap)
        if self._bwrap is None:
            _warn_unsandboxed(f"{bwrap} is not installed")
        if not seccomp.SUPPORTED:
            logger.warning(
                "verifiers run without a system call filter: none is implemented for %s",
                platform.machine(),
            )
        self._bwrap_works = False
        self._closed = False
        self._idle: list[JailProcess] = []
        self._busy: set[JailProcess] = set()
        self._owner_pid = os.getpid()
        self._semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
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
        """Like `run_verifier`, on two database images. A forbidden action is a VerifierError too."""
        request = VerifyRequest(
            code=code,
            final_answer=final_answer,
            conversation=conversation,
            partial_credit=partial_credit,
            timeout_seconds=timeout_seconds,
        )
        packed = pack_request(request, seed, current)
        async with self._get_semaphore():
            worker = await self._acquire_worker()
            reply = await self._ask(worker, packed, timeout_seconds + _GRACE_SECONDS)
        verdict = unpack_reply(reply)
        success = verdict.reward >= SUCCESS_REWARD
        return Grade(reward=verdict.reward, success=success, explanation=verdict.stdout)

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers."""
        return [worker.pid for worker in (*self._idle, *self._busy)]

    def close(self) -> None:
        """End all workers. Verifications in progress end as unknown, and no new ones start."""
        self._closed = True
        self._drop_inherited_workers()
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

    def _get_semaphore(self) -> asyncio.Semaphore:
        """A semaphore belongs to one event loop, and every asyncio.run has its own."""
        loop = asyncio.get_running_loop()
        return self._semaphores.setdefault(loop, asyncio.Semaphore(self._n_workers))

    async def _ask(self, worker: JailProcess, request: bytes, timeout_seconds: float) -> bytes:
        self._busy.add(worker)
        answered = False
        try:
            reply = await worker.ask(request, timeout_seconds)
            answered = True
        except OSError as error:
            raise VerifierError(
                f"the jail worker failed ({error}); the grade is unknown, a new worker replaces it"
            ) from error
        finally:
            self._busy.discard(worker)
            if answered and worker.alive and not self._closed:
                self._idle.append(worker)
            else:
                worker.end()
        return reply

    async def _acquire_worker(self) -> JailProcess:
        if self._closed:
            raise VerifierError("the jail is closed, so the grade is unknown; open another Jail")
        self._drop_inherited_workers()
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                return worker
            worker.end()
        try:
            return await self._start_worker()
        except OSError as error:
            raise VerifierError(
                f"the jail cannot start a worker ({error}); the grade is unknown"
            ) from error

    async def _start_worker(self) -> JailProcess:
        bwrap = self._bwrap
        if bwrap is not None:
            try:
                worker = await _start_process(build_bwrap_command(bwrap))
            except ConnectionError as error:
                # If the sandbox worked before, a failure now is no reason to run without it.
                if self._bwrap_works:
                    raise
                if self._bwrap is not None:
                    self._bwrap = None
                    _warn_unsandboxed(str(error))
            else:
                self._bwrap_works = True
                return worker
        return await _start_process(build_plain_command())

    def _drop_inherited_workers(self) -> None:
        """After a fork the workers belong to the parent process."""
        if self._owner_pid != os.getpid():
            self._owner_pid = os.getpid()
            self._idle, self._busy = [], set()


async def _start_process(command: list[str]) -> JailProcess:
    """Start a worker and wait until it has answered a probe."""
    worker = JailProcess(command)
    try:
        unpack_reply(await worker.ask(_PROBE, _START_SECONDS))
    except BaseException:
        worker.end()
        raise
    return worker


def _warn_unsandboxed(reason: str) -> None:
    logger.warning(
        "VERIFIERS RUN OUTSIDE A SANDBOX: %s. Resource limits%s remain. "
        "Install bubblewrap (apt install bubblewrap) and allow unprivileged user namespaces "
        "before you grade tasks from untrusted sources.",
        reason,
        " and a system call filter" if seccomp.SUPPORTED else "",
    )


def build_plain_command() -> list[str]:
    """Start a worker with resource limits and the system call filter only."""
    return _build_python_command(_PACKAGE.parent)


def build_bwrap_command(bwrap: str) -> list[str]:
    """Start a worker in bubblewrap: it sees Python's own files, read-only, and nothing else."""
    needed = dict.fromkeys([*_LIBRARIES, f"{sys.base_prefix}/lib", _PYTHON])
    binds = [word for path in needed for word in ("--ro-bind-try", path, path)]
    namespaces = ["--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534"]
    isolation = ["--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"]
    package = ["--ro-bind", str(_PACKAGE), "/jail/skyfleet", "--dev-bind", os.devnull, os.devnull]
    root = ["--remount-ro", "/", "--chdir", "/", "--"]
    python = _build_python_command(Path("/jail"))
    return [bwrap, *namespaces, *isolation, *binds, *package, *root, *python]


def _build_python_command(root: Path) -> list[str]:
    # -I and -S: neither the environment nor an installed package affects how it starts.
    return [_PYTHON, "-I", "-S", "-B", "-c", _MAIN.format(root=str(root))]


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
