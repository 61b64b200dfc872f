"""WorkerEnv: an environment in a process of its own, which can be killed.

Requests and replies are JSON with a length in front, over pipes. Only what this process sends is
pickled: the environment's factory and its task. A worker that has closed its episode serves another.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
from base64 import b64encode
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from io import BytesIO
from threading import Lock
from time import monotonic
from typing import Any

from skyfleet.chat.message import Message, ToolSpec
from skyfleet.envs.env import Observation, Step, episode_ending
from skyfleet.envs.env_thread import EnvThread
from skyfleet.envs.guard import EnvGuard, current_guard
from skyfleet.envs.stalls import EnvInterrupt, is_interrupted
from skyfleet.envs.values import format_value
from skyfleet.errors import EnvError, EpisodeError, VerifierError
from skyfleet.tasks.task import Grade, Task
from skyfleet.trajectories.records import message_from_record, message_to_record

LENGTH = struct.Struct("!I")
HEARTBEAT_SECONDS = 1.0
"""A worker sends an empty message this often, whatever its environment does."""
SILENT_SECONDS = 60.0
"""A worker that has sent nothing for so long is killed."""
MAX_REPLY_BYTES = 512 * 2**20
_MAX_SOURCE_BYTES = 64 * 2**20
_CANCEL_SECONDS = 2.0
"""A worker that does not acknowledge a cancellation for so long is killed."""
_MAX_IDLE = 16
_IDLE_SECONDS = 30.0
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
        self.last_heard = monotonic()

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
            self._send({"method": "cancel"})
        except (OSError, ValueError):
            pass  # it has ended
        finally:
            self._write_lock.release()

    def _send(self, message: Mapping[str, Any]) -> None:
        sent = json.dumps(message).encode()
        assert self._process.stdin is not None
        self._process.stdin.write(LENGTH.pack(len(sent)) + sent)
        self._process.stdin.flush()

    def kill(self) -> None:
        """Kill the process and all that it started, and reap it."""
        started = list(_find_descendants(self._process.pid)) if self.is_alive else []
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
            self.last_heard = silent_since = monotonic()
        return bytes(received)

    def _describe_end(self, error: Exception) -> str:
        if isinstance(error, ValueError) and str(error).startswith("sent"):
            return str(error)
        code = self._process.returncode
        if code is not None and code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"


def _find_descendants(pid: int) -> Iterator[int]:
    """The processes that `pid` started, and those that they started; none where /proc is missing."""
    with suppress(OSError, ValueError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                for child in map(int, file.read().split()):
                    yield child
                    yield from _find_descendants(child)


class _IdleWorkers:
    """Workers that wait for another episode of the same environment."""

    def __init__(self) -> None:
        self._idle: dict[Worker, bytes] = {}
        self._lock = Lock()

    def take(self, packed: bytes, memory_gb: float) -> Worker | None:
        with self._lock:
            for worker, its_packed in tuple(self._idle.items()):
                if not worker.is_alive:
                    del self._idle[worker]
                elif its_packed == packed and worker.memory_gb == memory_gb:
                    del self._idle[worker]
                    return worker
        return None

    def put(self, packed: bytes, worker: Worker) -> None:
        with self._lock:
            is_kept = len(self._idle) < _MAX_IDLE
            if is_kept:
                self._idle[worker] = packed
        if is_kept:
            asyncio.get_running_loop().call_later(_IDLE_SECONDS, self._discard, worker)
        else:
            worker.kill()

    def kill_all(self) -> None:
        for worker in tuple(self._idle):
            self._discard(worker)

    def _discard(self, worker: Worker) -> None:
        with self._lock:
            was_idle = self._idle.pop(worker, None) is not None
        if was_idle:
            worker.kill()


_idle = _IdleWorkers()
atexit.register(_idle.kill_all)
kill_idle_workers = _idle.kill_all


class WorkerEnv:
    def __init__(self, worker: Worker, thread: EnvThread, packed: bytes) -> None:
        self._worker, self._thread, self._packed = worker, thread, packed
        self._is_closed = False

    async def reset(self) -> Observation:
        return _read_observation(await self._call({"method": "reset"}))

    async def step(self, action: Message) -> Step:
        result = await self._call({"method": "step", "action": message_to_record(action)})
        opening = result.pop("opening")
        return Step(
            **{**result, "messages": tuple(map(message_from_record, result["messages"]))},
            opening=None if opening is None else _read_observation(opening),
        )

    async def grade(self) -> Grade | None:
        result = await self._call({"method": "grade", "ending": episode_ending.get()})
        return None if result is None else Grade(**result)

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = is_reusable = True
        try:
            if self._worker.is_alive:
                is_reusable = (await self._call({"method": "close"}))["is_reusable"]
                if is_reusable:
                    _idle.put(self._packed, self._worker)
        except BaseException:
            is_reusable = False
            raise
        finally:
            if not (is_reusable and self._worker.is_alive):
                self._worker.kill()
            self._thread.end()

    async def _call(self, request: Mapping[str, Any]) -> Any:
        waiting = self._thread.submit(self._worker.exchange, request)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            if not waiting.done():
                await self._cancel(waiting)
            raise

    async def _cancel(self, waiting: asyncio.Future[Any]) -> None:
        """Cancel the call and wait for its end. A worker that blocks ends itself or is killed."""
        self._worker.cancel()
        start = monotonic()
        while not waiting.done():
            await asyncio.wait({waiting}, timeout=_CANCEL_SECONDS / 4)
            if self._worker.last_heard < start < monotonic() - _CANCEL_SECONDS:
                self._worker.kill()
        error = waiting.exception()
        if is_interrupted(error):
            raise error
        if not self._worker.is_alive and (guard := current_guard.get()) is not None:
            guard.abandoned = True


@cache
def _starter() -> ThreadPoolExecutor:
    # Linux kills a worker when the thread that started it ends, so this one never does.
    return ThreadPoolExecutor(1, "skyfleet workers")


async def open_in_worker(
    packed: bytes, task: Task, guard: EnvGuard, *, memory_gb: float, max_characters: int
) -> WorkerEnv:
    """Open the environment in an idle worker of the same kind, or in a new one."""
    packed_task = pack_task(task)
    thread = EnvThread(f"env worker {task.key}", asyncio.Semaphore(1))
    worker: Worker | None = None
    try:
        worker = _idle.take(packed, memory_gb) or await _start_worker(memory_gb)
        env = WorkerEnv(worker, thread, packed)
        await env._call(
            {
                "method": "open",
                "source": b64encode(packed).decode(),
                "task": b64encode(packed_task).decode(),
                "max_characters": max_characters,
                "limit_seconds": guard.limit_seconds,
                "cancel_grace_seconds": guard.cancel_grace_seconds,
            }
        )
    except BaseException:
        if worker is not None:
            worker.kill()
        thread.end()
        raise
    return env


async def _start_worker(memory_gb: float) -> Worker:
    loop = asyncio.get_running_loop()
    starting = loop.run_in_executor(_starter(), Worker, memory_gb)
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        starting.add_done_callback(_kill_started)
        raise


def _kill_started(starting: asyncio.Future[Worker]) -> None:
    """Nobody waits for this worker any more."""
    if not starting.cancelled() and starting.exception() is None:
        starting.result().kill()


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


def _read_observation(record: Any) -> Observation:
    if not isinstance(record, dict):
        raise EnvError(f"the worker process sent {format_value(record)}, not an observation")
    return Observation(
        messages=tuple(map(message_from_record, record["messages"])),
        tools=tuple(ToolSpec(**tool) for tool in record["tools"]),
        use_native_tool_calling=record["use_native_tool_calling"],
    )
