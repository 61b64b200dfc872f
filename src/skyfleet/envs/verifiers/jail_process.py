"""JailProcess: a worker as seen from outside, one question at a time."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import skyfleet
from skyfleet.envs.verifiers.jail_frames import MAX_REPLY_BYTES, SIZE, framed

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
