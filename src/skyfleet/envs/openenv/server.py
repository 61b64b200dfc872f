"""Serve environments over OpenEnv: `reset(task_key=...)`, list tools, call tools, final reward.

An episode ends when its environment is done, by the tool `done`, or after `max_steps`. Its last
observation carries the reward, or `metadata.grade_error` if the grade is unknown.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from skyfleet.chat.message import Message, ToolCall
from skyfleet.envs.content_blocks import to_content_blocks
from skyfleet.envs.env import DONE, Env, EnvFactory, Step, close_env, grade_env
from skyfleet.envs.env import Observation as EnvObservation
from skyfleet.envs.openenv.client import END_TOOL
from skyfleet.errors import (
    EnvError,
    EpisodeError,
    MissingExtraError,
    SkyfleetError,
    TaskError,
    VerifierError,
    wrap_errors,
)
from skyfleet.tasks.task import Task

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import ASGIApp


@contextmanager
def _unimportable(name: str) -> Iterator[None]:
    """Make the import of `name` fail inside this block, as if it were not installed."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]


# openenv imports gradio for its web page if it is installed, which takes four seconds.
with _unimportable("gradio"):
    try:
        from fastapi.exceptions import RequestValidationError
        from openenv.core.env_server import (
            CallToolAction,
            CallToolObservation,
            ConcurrencyConfig,
            Environment,
            ListToolsAction,
            ListToolsObservation,
            Observation,
            State,
            Tool,
            ToolError,
            ToolErrorType,
            create_app,
        )
        from starlette.responses import JSONResponse
    except ImportError:
        raise MissingExtraError("openenv", "openenv") from None

_CLOSE_SECONDS = 10
_CLOSED = "the session was closed or was idle too long; connect again"


def openenv_app(
    tasks: Sequence[Task],
    open_env: EnvFactory,
    *,
    max_sessions: int,
    max_steps: int = 50,
    idle_timeout_seconds: float | None = None,
) -> ASGIApp:
    """Serve `tasks`, one environment per WebSocket, at most `max_sessions` at once.

    openenv checks for idle sessions at most every five seconds.
    """
    by_key = {task.key: task for task in tasks}
    app: FastAPI = create_app(
        partial(ServedEnv, by_key, open_env, max_steps),
        CallToolAction,
        CallToolObservation,
        env_name="skyfleet",
        concurrency_config=ConcurrencyConfig(
            max_concurrent_envs=max_sessions, session_timeout=idle_timeout_seconds
        ),
    )
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    app.add_exception_handler(SkyfleetError, _answer_error)
    return app


async def _answer_invalid(request: object, error: Any) -> JSONResponse:
    """FastAPI repeats the invalid value in its answer, and fails at NaN or half a surrogate pair."""
    places = [".".join(map(str, each.get("loc", ()))) for each in error.errors()[:3]]
    return JSONResponse({"detail": f"the request is invalid at {', '.join(places)!a}"}, 422)


async def _answer_error(request: object, error: Exception) -> JSONResponse:
    return JSONResponse({"detail": ascii(str(error))[1:-1]}, 400)


class ServedEnv(Environment):  # type: ignore[misc]  # openenv has no types
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, tasks: Mapping[str, Task], open_env: EnvFactory, max_steps: int) -> None:
        super().__init__()
        self._tasks, self._open_env, self._max_steps = tasks, open_env, max_steps
        self._env: Env | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._prompt = EnvObservation(messages=())
        self._steps: list[Step] = []
        self._state = State()
        self._done = self._closed = False
        self._turn = asyncio.Lock()

    async def reset_async(
        self, episode_id: str | None = None, task_key: object = None, **ignored: object
    ) -> Observation:
        async with self._turn:
            return await self._reset(episode_id, task_key)

    async def _reset(self, episode_id: str | None, task_key: object) -> Observation:
        if self._closed:
            raise EnvError(_CLOSED)
        task = self._tasks.get(str(task_key))
        if task is None:
            raise TaskError(_describe_unknown(task_key, self._tasks))
        env, self._env = self._env, None
        if env is not None:
            await close_env(env)
        self._thread, self._loop = get_ident(), asyncio.get_running_loop()
        self._env = await self._open_env(task)
        self._prompt, self._done, self._steps = await self._env.reset(), False, []
        self._state = State(episode_id=episode_id or str(uuid4()), step_count=0)
        texts = {message.role: message.text for message in self._prompt.messages}
        metadata = {
            "task_key": task.key,
            "prompt": texts.get("user", task.prompt),
            "system_prompt": texts.get("system", ""),
        }
        return Observation(metadata=metadata)

    async def step_async(
        self, action: CallToolAction | ListToolsAction, **ignored: object
    ) -> Observation:
        async with self._turn:
            return await self._step(action)

    async def _step(self, action: CallToolAction | ListToolsAction) -> Observation:
        if self._closed:
            raise EnvError(_CLOSED)
        if self._env is None:
            raise EnvError("no episode is open; call reset with a task_key first")
        if isinstance(action, ListToolsAction):
            return ListToolsObservation(tools=self._list_tools())
        if self._done:
            raise EnvError("the episode is over; call reset for another")
        self._state.step_count += 1
        call = ToolCall(id="call_0", name=action.tool_name, arguments=action.arguments)
        if action.tool_name == END_TOOL:
            step = await self._env.step(Message(role="assistant", content=DONE))
        else:
            step = await self._env.step(Message(role="assistant", tool_calls=(call,)))
        self._steps.append(step)
        self._done = step.done or self._state.step_count >= self._max_steps
        grade = await _grade(self._env, self._steps) if self._done else {}
        result = _format_result(step)
        return CallToolObservation(tool_name=call.name, done=self._done, **result, **grade)

    def reset(self, *args: object, **keywords: object) -> Observation:
        raise NotImplementedError("openenv prefers reset_async")

    def step(self, *args: object, **keywords: object) -> Observation:
        raise NotImplementedError("openenv prefers step_async")

    @property
    def state(self) -> State:
        return self._state

    def close(self) -> None:
        """Called in the session's thread, or on the loop for a request without a session."""
        self._closed = True
        if self._loop is None:
            return
        closing = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        if get_ident() != self._thread:
            closing.result(_CLOSE_SECONDS)

    async def _close(self) -> None:
        # openenv records a step when it ends, so a session may count as idle during one.
        async with self._turn:
            env, self._env = self._env, None
            if env is not None:
                await close_env(env)

    def _list_tools(self) -> list[Tool]:
        end = Tool(
            name=END_TOOL,
            description="Say that you have finished.",
            input_schema={"type": "object", "properties": {}},
        )
        tools = [
            Tool(name=spec.name, description=spec.description, input_schema=dict(spec.parameters))
            for spec in self._prompt.tools
        ]
        return [*tools, end]


async def _grade(env: Env, steps: Sequence[Step]) -> dict[str, Any]:
    try:
        with wrap_errors(VerifierError, "grade"):
            grade = await grade_env(env, steps)
    except EpisodeError as error:
        return {"metadata": {"grade_error": str(error)}}
    if grade is None:
        return {"metadata": {"grade_error": "the env gave no grade"}}
    metadata = {"success": grade.success, "explanation": grade.explanation}
    return {"reward": grade.reward, "metadata": metadata}


def _format_result(step: Step) -> dict[str, Any]:
    """Return all messages of the step as the tool's result."""
    if any(message.is_error for message in step.messages):
        text = "\n".join(message.text for message in step.messages)
        return {"error": ToolError(error_type=ToolErrorType.EXECUTION_ERROR, message=text)}
    if all(isinstance(message.content, str) for message in step.messages):
        return {"result": "\n".join(message.text for message in step.messages)}
    blocks = [block for message in step.messages for block in to_content_blocks(message.content)]
    return {"result": {"content": blocks}}


def _describe_unknown(task_key: object, known: Mapping[str, Task]) -> str:
    near = get_close_matches(str(task_key), known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"{len(known)} tasks, such as {[*known][:3]}"
    return f"task_key={task_key!r} is unknown; {hint}"
