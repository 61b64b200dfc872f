"""Worker: a process that runs one environment at a time, and can be killed.

Requests and replies are JSON with a length in front, over pipes. Only what this process sends is
pickled: the environment's factory and its task.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from io import BytesIO
from threading import Lock
from time import monotonic
from typing import Any

from skyfleet.envs.stalls import EnvInterrupt
from skyfleet.errors import EnvError, EpisodeError, VerifierError
from skyfleet.tasks.task import Task

LENGTH = struct.Struct("!I")
HEARTBEAT_SECONDS = 1.0
"""A worker sends an empty message this often, whatever its environment does."""
SILENT_SECONDS = 60.0
"""A worker that has sent nothing for so long is killed."""
MAX_REPLY_BYTES = 512 * 2**20
_MAX_SOURCE_BYTES = 64 * 2**20
_MAIN = (
    "import sys; sys.path[:] = {path!r}; from skyfleet.envs.worker_main import main; main({gb!r})"
)


class NotMovableError(Exception):
    """The environment cannot be sent to another process."""


def pack_source(source: object) -> bytes:
    """Pickle what a worker makes the environment's factory of: a `module:name` or an object."""
    return pickle.dumps(source) if isinstance(source, str) else _pack(source)


def pack_task(task: Task) -> bytes:
    try:
        return pickle.dumps(task)
    except Exception:  # whatever its metadata holds, such as a function without a name
        return _pack(task)


def _pack(source: object) -> bytes:
    try:
        import cloudpickle
    except ImportError:
        raise NotMovableError(
            "sending an object needs cloudpickle, which comes with the extra isolation; or name "
            "the environment as environment.env_class=module:name"
        ) from None

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            if getattr(value, "is_cuda", False) is True:
                raise pickle.PicklingError("it holds a tensor on a GPU")
            return super().reducer_override(value)

    packed = BytesIO()
    try:
        Pickler(packed).dump(source)
    except Exception as error:  # whatever the user's objects raise
        raise NotMovableError(f"it cannot be pickled: {type(error).__name__}: {error}") from None
    content = packed.getvalue()
    if len(content) > _MAX_SOURCE_BYTES:
        raise NotMovableError(f"it holds {len(content):,} bytes of data")
    return content


class Worker:
    """A worker process. `exchange` blocks, so it is called in a thread."""

    def __init__(self, memory_gb: float) -> None:
        self.memory_gb = memory_gb
        path = [os.path.abspath(entry or ".") for entry in sys.path]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _MAIN.format(path=path, gb=memory_gb)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Its own group: Ctrl-C goes to this process, and killing it kills what it started.
            start_new_session=True,
        )
        self._n_requests = 0
        self._lock, self._write_lock = Lock(), Lock()
        self.last_message_at = monotonic()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def exchange(self, request: Mapping[str, Any]) -> Any:
        """Send a request and return its result; EnvError if the worker ends or is silent."""
        with self._lock:
            self._n_requests += 1
            number = self._n_requests
            try:
                with self._write_lock:
                    self._send({"id": number, **request})
                while True:
                    reply = json.loads(self._receive())
                    if reply["id"] == number:
                        return _read_result(reply)
            except (OSError, EOFError, ValueError, KeyError) as error:
                self.kill()
                raise EnvError(f"the worker process {self._describe_end(error)}") from None

    def cancel(self) -> None:
        """Ask the worker to cancel the call that runs, or to interrupt it if it blocks."""
        if not self._write_lock.acquire(blocking=False):
            self.kill()  # it does not even read its request
            return
        try:
            self._send({"method": "cancel", "id": self._n_requests})
        except (OSError, ValueError):
            pass  # it has ended
        finally:
            self._write_lock.release()

    def _send(self, message: Mapping[str, Any]) -> None:
        sent = json.dumps(message).encode()
        assert self._process.stdin is not None
        self._process.stdin.write(LENGTH.pack(len(sent)) + sent)
        self._process.stdin.flush()

    @property
    def has_children(self) -> bool:
        return any(find_descendants(self._process.pid))

    def kill(self) -> None:
        """Kill the process and all that it started, and reap it."""
        started = list(find_descendants(self._process.pid)) if self.is_alive else []
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for pid in started:  # those with a session of their own
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            # What is buffered cannot be written any more.
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def _receive(self) -> bytes:
        while not (length := LENGTH.unpack(self._read(LENGTH.size))[0]):
            pass  # a heartbeat
        if length > MAX_REPLY_BYTES:
            raise ValueError(f"sent {length:,} bytes, more than {MAX_REPLY_BYTES:,}")
        return self._read(length)

    def _read(self, n_bytes: int) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        received = bytearray()
        silent_since = monotonic()
        while len(received) < n_bytes:
            if not select.select([descriptor], [], [], HEARTBEAT_SECONDS)[0]:
                if not self.is_alive:
                    raise EOFError  # what it started may still hold the pipe open
                if monotonic() - silent_since > SILENT_SECONDS:
                    raise ValueError(f"sent no heartbeat for {SILENT_SECONDS:g} s and was killed")
                continue
            if not (part := os.read(descriptor, min(n_bytes - len(received), 1 << 20))):
                raise EOFError
            received += part
            self.last_message_at = silent_since = monotonic()
        return bytes(received)

    def _describe_end(self, error: Exception) -> str:
        if isinstance(error, ValueError) and str(error).startswith("sent"):
            return str(error)
        code = self._process.returncode
        if code is not None and code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"


def find_descendants(pid: int) -> Iterator[int]:
    """The processes that `pid` started, and those that they started; none where /proc is missing."""
    with suppress(OSError, ValueError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                for child in map(int, file.read().split()):
                    yield child
                    yield from find_descendants(child)


def _read_result(reply: Mapping[str, Any]) -> Any:
    if "error" not in reply:
        return reply["result"]
    detail = str(reply["detail"])
    if reply["error"] == "NotMovableError":
        raise NotMovableError(detail)
    if reply["error"] == "EnvInterrupt":
        raise EnvError(detail) from EnvInterrupt()
    kind: type[EpisodeError] = VerifierError if reply["error"] == "VerifierError" else EnvError
    raise kind(detail)
