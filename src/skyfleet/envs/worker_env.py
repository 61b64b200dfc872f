"""WorkerEnv: an environment in a worker process; a worker that has closed its episode serves another."""

from __future__ import annotations

import asyncio
import atexit
from base64 import b64encode
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from threading import Lock
from time import monotonic
from typing import Any

from skyfleet.chat.message import Message, ToolSpec
from skyfleet.envs.env import Observation, Step, episode_ending
from skyfleet.envs.env_thread import EnvThread
from skyfleet.envs.guard import EnvGuard, current_guard
from skyfleet.envs.stalls import is_interrupted
from skyfleet.envs.values import format_value
from skyfleet.envs.worker_process import Worker, pack_task
from skyfleet.errors import EnvError
from skyfleet.tasks.task import Grade, Task
from skyfleet.trajectories.records import message_from_record, message_to_record

_CANCEL_SECONDS = 2.0
"""A worker that does not acknowledge a cancellation for so long is killed."""
_MAX_IDLE = 16
_IDLE_SECONDS = 30.0


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
        self._waiting: asyncio.Future[Any] | None = None
        """The reply to the last request."""

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
            if self._waiting is not None and not self._waiting.done():
                self._worker.kill()  # that call was abandoned
            if self._worker.is_alive:
                is_reusable = (await self._call({"method": "close"}))["is_reusable"]
                # What the environment started and left running ends with its worker.
                is_reusable = is_reusable and not self._worker.has_children
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
        self._waiting = waiting = self._thread.submit(self._worker.exchange, request)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            if not waiting.done() and not self._is_closed:  # a worker that does not close is killed
                await self._cancel(waiting)
            if waiting.done() and is_interrupted(error := waiting.exception()):
                raise error from error.__cause__
            raise

    async def _cancel(self, waiting: asyncio.Future[Any]) -> None:
        """Cancel the call and wait for its end. A worker that blocks ends itself or is killed."""
        self._worker.cancel()
        start = monotonic()
        while not waiting.done():
            await asyncio.wait({waiting}, timeout=_CANCEL_SECONDS / 4)
            if self._worker.last_message_at < start < monotonic() - _CANCEL_SECONDS:
                self._worker.kill()
        if is_interrupted(waiting.exception()):
            return
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
    starting = _starter().submit(Worker, memory_gb)
    try:
        return await asyncio.wrap_future(starting)
    except asyncio.CancelledError:
        # Called in the starter's thread: the event loop may end before the worker has started.
        starting.add_done_callback(_kill_started)
        raise


def _kill_started(starting: Future[Worker]) -> None:
    """Nobody waits for this worker any more."""
    if not starting.cancelled() and starting.exception() is None:
        starting.result().kill()


def _read_observation(record: Any) -> Observation:
    if not isinstance(record, dict):
        raise EnvError(f"the worker process sent {format_value(record)}, not an observation")
    return Observation(
        messages=tuple(map(message_from_record, record["messages"])),
        tools=tuple(ToolSpec(**tool) for tool in record["tools"]),
        use_native_tool_calling=record["use_native_tool_calling"],
    )
