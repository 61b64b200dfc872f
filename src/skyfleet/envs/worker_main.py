"""The process of a WorkerEnv: open an environment, call it as asked, reply in JSON."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import pickle
import resource
import signal
from base64 import b64decode
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from threading import Event, Lock, Thread, Timer
from typing import Any

from skyfleet.config.imports import import_named
from skyfleet.envs.env import Env, Observation, Step, close_env, episode_ending, grade_env
from skyfleet.envs.env_task import EnvCall, EnvTask
from skyfleet.envs.guard import EnvGuard, install_task_factory
from skyfleet.envs.message_validation import count_characters, cut_messages
from skyfleet.envs.python_env import as_env_factory
from skyfleet.envs.stalls import EnvInterrupt
from skyfleet.envs.validation import (
    validate_grade,
    validate_observation,
    validate_step,
)
from skyfleet.envs.values import describe_error
from skyfleet.envs.worker_process import HEARTBEAT_SECONDS, LENGTH, NotMovableError
from skyfleet.errors import EnvError, EpisodeError, VerifierError
from skyfleet.trajectories.records import message_from_record, message_to_record
from skyfleet.trajectories.trajectory import Ending

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_BLOCKED_SECONDS = 1.5
"""A cancelled call that still holds the process after so long ends it; it is interrupted first."""
_LEFT_SECONDS = 1.0
"""For the tasks that an environment leaves behind."""


def main(memory_gb: float) -> None:
    """Serve requests until the other end closes its pipe."""
    with suppress(OSError, AttributeError):  # not Linux: the closed pipe ends the process too
        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # What it starts stays its descendant, so that it can be found and killed.
        prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if memory_gb > 0:
        limit = int(memory_gb * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    requests, replies = os.dup(0), os.dup(1)
    # What the environment prints goes to the log, and it reads an empty input.
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    writer = _Writer(replies)
    Thread(target=writer.beat, name="heartbeat", daemon=True).start()
    try:
        asyncio.run(_Server(requests, writer, memory_gb).serve())
    except BaseException as error:
        if writer.request_id is not None:
            writer.fail(f"the event loop of the worker ended: {describe_error(error)}")
    os._exit(1)


class _Writer:
    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._lock = descriptor, Lock()
        self.request_id: int | None = None
        """The request that has no reply yet."""

    def beat(self) -> None:
        while not Event().wait(HEARTBEAT_SECONDS):
            self._write(b"")

    def reply(self, **fields: Any) -> None:
        number, self.request_id = self.request_id, None
        self._write(json.dumps({"id": number, **fields}).encode())

    def fail(self, detail: str, kind: str = "EnvError") -> None:
        self.reply(error=kind, detail=detail)

    def acknowledge(self) -> None:
        self._write(b"")

    def _write(self, content: bytes) -> None:
        data = memoryview(LENGTH.pack(len(content)) + content)
        with self._lock:
            try:
                while data:
                    data = data[os.write(self._descriptor, data) :]
            except OSError:
                os._exit(0)  # nobody reads any more


class _Server:
    def __init__(self, requests: int, writer: _Writer, memory_gb: float) -> None:
        self._requests, self._writer, self._memory_gb = requests, writer, memory_gb
        self._guard = EnvGuard("env", "", is_isolated=True)
        self._task: EnvTask | None = None
        self._env: Env | None = None
        self._steps: list[Step] = []
        self._max_characters = 0
        self._running: EnvCall | None = None
        self._cancelled_id = 0
        """The last request that the other end has cancelled."""

    async def serve(self) -> None:
        self._loop = loop = asyncio.get_running_loop()
        install_task_factory(loop)
        loop.add_signal_handler(signal.SIGINT, self._cancel_call)
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        Thread(target=self._read, args=(queue,), name="requests", daemon=True).start()
        while (request := await queue.get()) is not None:
            self._writer.request_id = request["id"]
            try:
                if request["id"] == self._cancelled_id:
                    raise asyncio.CancelledError
                self._writer.reply(result=await self._answer(request))
            except asyncio.CancelledError:
                self._writer.fail(f"{self._guard.during}: cancelled")
            except NotMovableError as error:
                self._writer.fail(str(error), "NotMovableError")
            except EpisodeError as error:
                self._writer.fail(*self._describe(error))

    def _describe(self, error: EpisodeError) -> tuple[str, str]:
        if isinstance(error.__cause__, EnvInterrupt):
            return str(error), "EnvInterrupt"
        text = str(error)
        if isinstance(error.__cause__, MemoryError) and self._memory_gb > 0:
            text = (
                f"{text.rstrip(': ')}: it needs more than environment.worker_memory_gb="
                f"{self._memory_gb:g}; raise it, or set 0 for no limit"
            )
        return text, type(error).__name__

    def _read(self, queue: asyncio.Queue[dict[str, Any] | None]) -> None:
        while True:
            try:
                length = LENGTH.unpack(self._receive(LENGTH.size))[0]
                request = json.loads(self._receive(length))
            except EOFError:
                os._exit(0)  # the process that started this one is gone or done with it
            if request["method"] == "cancel":
                self._cancel(request["id"])
            else:
                self._loop.call_soon_threadsafe(queue.put_nowait, request)

    def _cancel(self, number: int) -> None:
        """In the thread that reads: the environment may block the event loop."""
        self._cancelled_id = number
        self._writer.acknowledge()
        if self._writer.request_id != number:
            return  # it has its reply, or has not begun
        self._guard.must_end = True
        self._loop.call_soon_threadsafe(self._cancel_call)

        def end_blocked() -> None:
            if self._writer.request_id == number and self._guard.holds_loop:
                os._exit(1)

        timer = Timer(_BLOCKED_SECONDS, end_blocked)
        timer.daemon = True
        timer.start()

    def _cancel_call(self) -> None:
        if self._running is not None and self._task is not None:
            self._task.cancel(self._running)

    async def _call(
        self, kind: type[EpisodeError], during: str, function: Callable[..., Any], *args: Any
    ) -> Any:
        assert self._task is not None
        self._running = call = EnvCall(kind=kind, during=during, function=function, args=args)
        self._task.put(call)
        try:
            return await asyncio.wrap_future(call.future)
        finally:
            self._running = None

    def _receive(self, n_bytes: int) -> bytes:
        received = bytearray()
        while len(received) < n_bytes:
            part = os.read(self._requests, n_bytes - len(received))
            if not part:
                raise EOFError
            received += part
        return bytes(received)

    async def _answer(self, request: dict[str, Any]) -> Any:
        call = self._call
        match request["method"]:
            case "open":
                make = _load(request)
                self._max_characters, self._steps = request["max_characters"], []
                self._guard = EnvGuard(
                    "env",
                    "",
                    limit_seconds=request["limit_seconds"],
                    cancel_grace_seconds=request["cancel_grace_seconds"],
                    is_isolated=True,
                )
                self._task = EnvTask(self._loop, self._guard, on_end=lambda: None)
                self._env = await call(EnvError, "opening", make)
                return None
            case "reset":
                return self._dump(await call(EnvError, "reset", _reset, self._opened))
            case "step":
                action = message_from_record(request["action"])
                step: Step = await call(EnvError, "step", _step, self._opened, action)
                self._steps.append(step)
                return {
                    "messages": self._dump_messages(step.messages),
                    "done": step.done,
                    "reward": step.reward,
                    "info": dict(step.info),
                    "keep_recent_turns": step.keep_recent_turns,
                    "opening": None if step.opening is None else self._dump(step.opening),
                    "success": step.success,
                }
            case "grade":
                ending = request["ending"]
                ending = None if ending is None else Ending(ending)
                return await call(VerifierError, "grade", _grade, self._opened, self._steps, ending)
            case "close":
                env, self._env = self._env, None
                await call(EnvError, "close", close_env, env)
                return {"is_reusable": await self._end_tasks()}
        raise EnvError(f"unknown method {request['method']!r}")

    async def _end_tasks(self) -> bool:
        """End what the environment has left in the event loop; False if something remains."""
        assert self._task is not None
        self._task.end()
        if left := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(left, timeout=0.1)
        if left := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=_LEFT_SECONDS)
        timers: Any = getattr(self._loop, "_scheduled", ())
        has_timers = any(not timer.cancelled() for timer in timers)
        return not has_timers and asyncio.all_tasks() == {asyncio.current_task()}

    @property
    def _opened(self) -> Env:
        if self._env is None:
            raise EnvError("the worker process has no environment open")
        return self._env

    def _dump(self, observation: Observation) -> dict[str, Any]:
        return {
            "messages": self._dump_messages(observation.messages),
            "tools": [
                {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": dict(tool.parameters),
                }
                for tool in observation.tools
            ],
            "use_native_tool_calling": observation.use_native_tool_calling,
        }

    def _dump_messages(self, messages: Any) -> list[dict[str, Any]]:
        # One character more than the limit is enough for the other end to notice.
        limit = self._max_characters
        if 0 < limit < count_characters(messages):
            messages = cut_messages(messages, limit + 1)
        return [message_to_record(message) for message in messages]


def _load(request: dict[str, Any]) -> Callable[[], Awaitable[Env]]:
    """What opens the environment; NotMovableError if it or its task cannot be made here."""
    try:
        source = pickle.loads(b64decode(request["source"]))
        task = pickle.loads(b64decode(request["task"]))
        if isinstance(source, str):
            source = import_named(source, key="environment.env_class")
        return partial(as_env_factory(source), task)
    except Exception as error:
        raise NotMovableError(f"a worker cannot make it: {describe_error(error)}") from None


async def _reset(env: Env) -> Observation:
    return validate_observation(await env.reset())


async def _step(env: Env, action: Any) -> Step:
    return validate_step(await env.step(action))


async def _grade(env: Env, steps: list[Step], ending: Ending | None) -> dict[str, Any] | None:
    episode_ending.set(ending)
    grade = validate_grade(await grade_env(env, steps))
    if grade is None:
        return None
    return {
        "reward": grade.reward,
        "success": grade.success,
        "parts": dict(grade.parts),
        "explanation": grade.explanation,
    }
