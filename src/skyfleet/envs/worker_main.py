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
from contextlib import suppress
from threading import Event, Lock, Thread
from typing import Any

from skyfleet.config.imports import import_named
from skyfleet.envs.env import Env, Observation, Step, close_env, episode_ending, grade_env
from skyfleet.envs.guard import EnvGuard, install_task_factory
from skyfleet.envs.message_validation import count_characters, cut_messages
from skyfleet.envs.python_env import as_env_factory
from skyfleet.envs.validation import (
    validate_grade,
    validate_observation,
    validate_step,
)
from skyfleet.envs.values import describe_error
from skyfleet.envs.worker_env import HEARTBEAT_SECONDS, LENGTH
from skyfleet.errors import EnvError, EpisodeError, VerifierError
from skyfleet.trajectories.records import message_from_record, message_to_record
from skyfleet.trajectories.trajectory import Ending

_PR_SET_PDEATHSIG = 1


def main(memory_gb: float) -> None:
    """Serve requests until the other end closes its pipe."""
    with suppress(OSError, AttributeError):  # not Linux: the closed pipe ends the process too
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
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
        asyncio.run(_Server(requests, writer).serve())
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

    def fail(self, detail: str, kind: type[EpisodeError] = EnvError) -> None:
        self.reply(error=kind.__name__, detail=detail)

    def _write(self, content: bytes) -> None:
        data = memoryview(LENGTH.pack(len(content)) + content)
        with self._lock:
            try:
                while data:
                    data = data[os.write(self._descriptor, data) :]
            except OSError:
                os._exit(0)  # nobody reads any more


class _Server:
    def __init__(self, requests: int, writer: _Writer) -> None:
        self._requests, self._writer = requests, writer
        self._guard = EnvGuard("env", "", is_isolated=True)
        self._env: Env | None = None
        self._steps: list[Step] = []
        self._max_characters = 0
        self._running: asyncio.Task[Any] | None = None

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        install_task_factory(loop)
        loop.add_signal_handler(signal.SIGINT, self._cancel)
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        Thread(target=self._read, args=(loop, queue), name="requests", daemon=True).start()
        while (request := await queue.get()) is not None:
            self._writer.request_id = request["id"]
            self._running = asyncio.create_task(self._answer(request))
            try:
                self._writer.reply(result=await self._running)
            except asyncio.CancelledError:
                self._writer.fail(f"{self._guard.during}: cancelled")
            except EpisodeError as error:
                self._writer.fail(str(error), type(error))
            self._running = None

    def _read(
        self, loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[dict[str, Any] | None]
    ) -> None:
        while True:
            try:
                length = LENGTH.unpack(self._receive(LENGTH.size))[0]
                request = json.loads(self._receive(length))
            except EOFError:
                os._exit(0)  # the process that started this one is gone or done with it
            loop.call_soon_threadsafe(queue.put_nowait, request)

    def _receive(self, n_bytes: int) -> bytes:
        received = bytearray()
        while len(received) < n_bytes:
            part = os.read(self._requests, n_bytes - len(received))
            if not part:
                raise EOFError
            received += part
        return bytes(received)

    def _cancel(self) -> None:
        if self._running is not None:
            self._running.cancel()

    async def _answer(self, request: dict[str, Any]) -> Any:
        call = self._guard.call
        match request["method"]:
            case "open":
                self._max_characters, self._steps = request["max_characters"], []
                self._env = await call(EnvError, "opening", _open, request)
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
                episode_ending.set(None if ending is None else Ending(ending))
                return await call(VerifierError, "grade", _grade, self._opened, self._steps)
            case "close":
                env, self._env = self._env, None
                await call(EnvError, "close", close_env, env)
                return None
        raise EnvError(f"unknown method {request['method']!r}")

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


async def _open(request: dict[str, Any]) -> Env:
    source = pickle.loads(b64decode(request["source"]))
    task = pickle.loads(b64decode(request["task"]))
    if isinstance(source, str):
        source = import_named(source, key="environment.env_class")
    return await as_env_factory(source)(task)


async def _reset(env: Env) -> Observation:
    return validate_observation(await env.reset())


async def _step(env: Env, action: Any) -> Step:
    return validate_step(await env.step(action))


async def _grade(env: Env, steps: list[Step]) -> dict[str, Any] | None:
    grade = validate_grade(await grade_env(env, steps))
    if grade is None:
        return None
    return {
        "reward": grade.reward,
        "success": grade.success,
        "parts": dict(grade.parts),
        "explanation": grade.explanation,
    }
