"""Serve environments over MCP for other agents: `/{task_key}/mcp` for every task.

`initialize` opens an episode and returns the task's prompt as instructions. `GET /{task_key}/grade`
with the same `Mcp-Session-Id` ends the episode and returns its grade. DELETE, or being idle too
long, closes it. The app's lifespan must run, because it closes the sessions that are left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from difflib import get_close_matches
from time import monotonic
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, ValidationError

from skyfleet.chat.message import Message, ToolCall
from skyfleet.envs.content_blocks import DONE_META, to_content_blocks
from skyfleet.envs.env import Env, EnvFactory, Observation, Step, grade_env, open_env_until
from skyfleet.errors import EnvError, EpisodeError, MissingExtraError, VerifierError, wrap_errors
from skyfleet.tasks.task import Task

try:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
except ImportError:
    raise MissingExtraError("starlette", "serve") from None

SESSION_HEADER = "mcp-session-id"

_VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
_INVALID_REQUEST, _NO_METHOD, _INVALID_PARAMS, _INTERNAL = -32600, -32601, -32602, -32603
_NO_SESSION = "no such session for this task; it was closed or was idle too long: initialize again"


class _Message(BaseModel):
    model_config = ConfigDict(strict=True)

    id: int | str | None = None
    method: str | None = None
    params: dict[str, Any] | None = None


class _Call(BaseModel):
    model_config = ConfigDict(strict=True)

    name: str
    arguments: dict[str, Any] | None = None


class _RpcError(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def mcp_app(
    tasks: Sequence[Task],
    open_env: EnvFactory,
    *,
    max_sessions: int = 1024,
    idle_timeout_seconds: float = 900,
) -> Starlette:
    sessions = _Sessions(
        open_env, max_sessions=max_sessions, idle_timeout_seconds=idle_timeout_seconds
    )
    endpoint = _Endpoint({task.key: task for task in tasks}, sessions)
    return Starlette(
        routes=[
            Route("/{task_key:path}/mcp", endpoint.handle_message, methods=["POST"]),
            Route("/{task_key:path}/mcp", endpoint.delete_session, methods=["DELETE"]),
            Route("/{task_key:path}/grade", endpoint.grade, methods=["GET"]),
        ],
        lifespan=sessions.lifespan,
    )


class _Endpoint:
    """JSON-RPC by hand: it takes a quarter of the official server's CPU time per call."""

    def __init__(self, tasks: Mapping[str, Task], sessions: _Sessions) -> None:
        self._tasks, self._sessions = tasks, sessions

    async def handle_message(self, request: Request) -> Response:
        if "origin" in request.headers:
            # Only browsers send it, and a web page must not use a server on its reader's machine.
            return Response("requests from browsers are not served", status_code=403)
        try:
            message = _Message.model_validate_json(await request.body())
        except ValidationError:
            text = "the body is not one JSON-RPC message"
            return _make_error(None, _INVALID_REQUEST, text, status_code=400)
        if message.id is None or message.method is None:
            return Response(status_code=202)
        headers: dict[str, str] = {}
        try:
            if message.method == "initialize":
                session_id, result = await self._initialize(request, message.params or {})
                headers[SESSION_HEADER] = session_id
            else:
                episode = self._find(request)
                if episode is None:
                    return _make_error(message.id, _INVALID_REQUEST, _NO_SESSION, status_code=404)
                result = await _answer(episode, message.method, message.params or {})
        except _RpcError as error:
            return _make_error(message.id, error.code, str(error))
        except EpisodeError as error:
            return _make_error(message.id, _INTERNAL, str(error))
        answer = {"jsonrpc": "2.0", "id": message.id, "result": result}
        return JSONResponse(answer, headers=headers)

    async def delete_session(self, request: Request) -> Response:
        if self._find(request) is None:
            return JSONResponse({"error": _NO_SESSION}, status_code=404)
        await self._sessions.close(request.headers[SESSION_HEADER])
        return Response(status_code=204)

    async def grade(self, request: Request) -> Response:
        episode = self._find(request)
        if episode is None:
            return JSONResponse({"error": _NO_SESSION}, status_code=404)
        return JSONResponse(await episode.grade())

    def _find(self, request: Request) -> _Episode | None:
        session_id = request.headers.get(SESSION_HEADER, "")
        return self._sessions.find(session_id, request.path_params["task_key"])

    async def _initialize(
        self, request: Request, params: Mapping[str, Any]
    ) -> tuple[str, dict[str, Any]]:
        task_key = request.path_params["task_key"]
        if task_key not in self._tasks:
            near = get_close_matches(task_key, self._tasks, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {len(self._tasks)}"
            raise _RpcError(_INVALID_PARAMS, f"task {task_key!r} is unknown; {hint}")
        session_id, episode = await self._sessions.open(self._tasks[task_key])
        messages = episode.observation.messages
        version = params.get("protocolVersion")
        return session_id, {
            "protocolVersion": version if version in _VERSIONS else _VERSIONS[0],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": f"skyfleet-{episode.task.env_key}", "version": "1"},
            "instructions": "\n".join(each.text for each in messages if each.role == "user"),
        }


async def _answer(episode: _Episode, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
    match method:
        case "ping":
            return {}
        case "tools/list":
            return {
                "tools": [
                    {
                        "name": tool.name,
                        "description": tool.description,
                        "inputSchema": dict(tool.parameters),
                    }
                    for tool in episode.observation.tools
                ]
            }
        case "tools/call":
            try:
                call = _Call.model_validate(params)
            except ValidationError as error:
                raise _RpcError(
                    _INVALID_PARAMS, "tools/call takes a name and an object of arguments"
                ) from error
            return await episode.call(call.name, call.arguments or {})
    raise _RpcError(_NO_METHOD, f"method {method!r} is unknown here")


def _make_error(
    request_id: int | str | None, code: int, text: str, *, status_code: int = 200
) -> Response:
    error = {"jsonrpc": "2.0", "id": request_id, "error": {"code": code, "message": text}}
    return JSONResponse(error, status_code=status_code)


class _Episode:
    """The episode of one session."""

    def __init__(
        self, task: Task, env: Env, observation: Observation, closing: AsyncExitStack
    ) -> None:
        self.task, self.observation = task, observation
        self._env, self._closing = env, closing
        self._lock = asyncio.Lock()
        self._steps: list[Step] = []
        self._last_used, self._is_over = monotonic(), False
        self._grade: dict[str, Any] | None = None

    @property
    def idle_seconds(self) -> float:
        return 0.0 if self._lock.locked() else monotonic() - self._last_used

    async def call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result of `tools/call`; concurrent calls run one after another."""
        async with self._lock:
            self._last_used = monotonic()
            if self._is_over:
                text = "Error: the episode is over; open another session."
                return {"content": to_content_blocks(text), "isError": True}
            call = ToolCall(id="call_0", name=name, arguments=arguments)
            with wrap_errors(EnvError, "step"):
                step = await self._env.step(Message(role="assistant", tool_calls=(call,)))
            self._steps.append(step)
            self._is_over = step.done
            blocks = [to_content_blocks(reply.content) for reply in step.messages]
            return {
                "content": [block for of_reply in blocks for block in of_reply],
                "isError": any(reply.is_error for reply in step.messages),
                "_meta": {DONE_META: step.done},
            }

    async def grade(self) -> dict[str, Any]:
        """End the episode and grade it once; later calls return the same grade."""
        async with self._lock:
            self._last_used, self._is_over = monotonic(), True
            if self._grade is None:
                self._grade = await self._compute_grade()
            return self._grade

    async def _compute_grade(self) -> dict[str, Any]:
        try:
            with wrap_errors(VerifierError, "grade"):
                grade = await grade_env(self._env, self._steps)
        except EpisodeError as error:
            return {"reward": None, "error": str(error)}
        if grade is None:
            return {"reward": None}
        return {
            "reward": grade.reward,
            "success": grade.success,
            "explanation": grade.explanation,
        }

    async def close(self) -> None:
        async with self._lock:
            self._is_over = True
            await self._closing.aclose()


class _Sessions:
    """The open episodes by session id."""

    def __init__(
        self, open_env: EnvFactory, *, max_sessions: int, idle_timeout_seconds: float
    ) -> None:
        self._open_env, self._max_sessions = open_env, max_sessions
        self._idle_timeout_seconds = idle_timeout_seconds
        self._semaphore = asyncio.Semaphore(max_sessions)
        self._episodes: dict[str, _Episode] = {}

    def find(self, session_id: str, task_key: str) -> _Episode | None:
        episode = self._episodes.get(session_id)
        return episode if episode is not None and episode.task.key == task_key else None

    async def open(self, task: Task) -> tuple[str, _Episode]:
        if self._semaphore.locked():
            raise EnvError(f"all {self._max_sessions} sessions are open; close one or retry later")
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._semaphore)
            env = await open_env_until(stack, self._open_env, task)
            with wrap_errors(EnvError, "reset"):
                observation = await env.reset()
            session_id, episode = uuid4().hex, _Episode(task, env, observation, stack.pop_all())
        self._episodes[session_id] = episode
        return session_id, episode

    async def close(self, session_id: str) -> None:
        episode = self._episodes.pop(session_id, None)
        if episode is not None:
            await episode.close()

    @asynccontextmanager
    async def lifespan(self, app: object) -> AsyncIterator[None]:
        """Close idle sessions while the app runs and all others when it ends."""
        closing_idle = asyncio.create_task(self._close_idle())
        try:
            yield
        finally:
            closing_idle.cancel()
            await asyncio.gather(closing_idle, return_exceptions=True)
            for session_id in tuple(self._episodes):
                await self.close(session_id)

    async def _close_idle(self) -> None:
        while True:
            await asyncio.sleep(self._idle_timeout_seconds / 4)
            for session_id, episode in tuple(self._episodes.items()):
                if episode.idle_seconds > self._idle_timeout_seconds:
                    await self.close(session_id)
