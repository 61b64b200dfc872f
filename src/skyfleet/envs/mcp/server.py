"""Our envs as MCP servers for other agents: `/{task_key}/mcp` for every task.

`initialize` opens an episode and gives the wish as its instructions. `GET /{task_key}/grade` with
the same `Mcp-Session-Id` ends it and tells its grade. DELETE, or idling too long, closes it; the
app's lifespan must run, for it closes what nobody closed.
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
from skyfleet.envs.content_blocks import DONE_META, blocks_of
from skyfleet.envs.env import Env, EnvFactory, Observation, opened
from skyfleet.errors import EnvError, EpisodeError, MissingExtraError, VerifierError, wrap_errors
from skyfleet.tasks.task import Task


class Episode:
    def __init__(self, task: Task, env: Env, opening: Observation, closing: AsyncExitStack) -> None:
        self.task, self.opening = task, opening
        self._env, self._closing = env, closing
        self._turn = asyncio.Lock()
        self._used, self._over = monotonic(), False
        self._told: dict[str, Any] | None = None

    @property
    def idle_seconds(self) -> float:
        return 0.0 if self._turn.locked() else monotonic() - self._used

    async def call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """What `tools/call` answers; calls that come together are made one after another."""
        async with self._turn:
            self._used = monotonic()
            if self._over:
                text = "Error: the episode is over; open another session."
                return {"content": blocks_of(text), "isError": True}
            call = ToolCall(id="call_0", name=name, arguments=arguments)
            with wrap_errors(EnvError, "step"):
                step = await self._env.step(Message(role="assistant", tool_calls=(call,)))
            self._over = step.done
            return {
                "content": [block for reply in step.messages for block in blocks_of(reply.content)],
                "isError": any(reply.is_error for reply in step.messages),
                "_meta": {DONE_META: step.done},
            }

    async def grade(self) -> dict[str, Any]:
        """Ends the episode. The env is asked once; whoever asks again hears the same."""
        async with self._turn:
            self._used, self._over = monotonic(), True
            if self._told is None:
                self._told = await self._graded()
            return self._told

    async def _graded(self) -> dict[str, Any]:
        try:
            with wrap_errors(VerifierError, "grade"):
                grade = await self._env.grade()
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
        async with self._turn:
            self._over = True
            await self._closing.aclose()


class Episodes:
    def __init__(
        self, open_env: EnvFactory, *, max_sessions: int, idle_timeout_seconds: float
    ) -> None:
        self._open_env, self._max_sessions = open_env, max_sessions
        self._idle_timeout_seconds = idle_timeout_seconds
        self._places = asyncio.Semaphore(max_sessions)
        self._open: dict[str, Episode] = {}

    def find(self, session_id: str, task_key: str) -> Episode | None:
        episode = self._open.get(session_id)
        return episode if episode is not None and episode.task.key == task_key else None

    async def open(self, task: Task) -> tuple[str, Episode]:
        if self._places.locked():
            raise EnvError(f"all {self._max_sessions} sessions are open; close one or come again")
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._places)
            env = await opened(self._open_env, task, stack)
            with wrap_errors(EnvError, "reset"):
                opening = await env.reset()
            session_id, episode = uuid4().hex, Episode(task, env, opening, stack.pop_all())
        self._open[session_id] = episode
        return session_id, episode

    async def close(self, session_id: str) -> None:
        episode = self._open.pop(session_id, None)
        if episode is not None:
            await episode.close()

    @asynccontextmanager
    async def kept(self, app: object) -> AsyncIterator[None]:
        """As an app's lifespan: the idle are closed while it runs, the rest when it ends."""
        reaping = asyncio.create_task(self._reap())
        try:
            yield
        finally:
            reaping.cancel()
            await asyncio.gather(reaping, return_exceptions=True)
            for session_id in tuple(self._open):
                await self.close(session_id)

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(self._idle_timeout_seconds / 4)
            for session_id, episode in tuple(self._open.items()):
                if episode.idle_seconds > self._idle_timeout_seconds:
                    await self.close(session_id)


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
    episodes = Episodes(
        open_env, max_sessions=max_sessions, idle_timeout_seconds=idle_timeout_seconds
    )
    endpoint = _Endpoint({task.key: task for task in tasks}, episodes)
    return Starlette(
        routes=[
            Route("/{task_key:path}/mcp", endpoint.converse, methods=["POST"]),
            Route("/{task_key:path}/mcp", endpoint.end, methods=["DELETE"]),
            Route("/{task_key:path}/grade", endpoint.grade, methods=["GET"]),
        ],
        lifespan=episodes.kept,
    )


class _Endpoint:
    """JSON-RPC by hand: a quarter of the CPU time that the official server takes for a call."""

    def __init__(self, tasks: Mapping[str, Task], episodes: Episodes) -> None:
        self._tasks, self._episodes = tasks, episodes

    async def converse(self, request: Request) -> Response:
        if "origin" in request.headers:
            # Only browsers send one, and a page must not reach a server on its reader's machine.
            return Response("pages in a browser are not served here", status_code=403)
        try:
            message = _Message.model_validate_json(await request.body())
        except ValidationError:
            text = "the body is not one JSON-RPC message"
            return _failed(None, _INVALID_REQUEST, text, status_code=400)
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
                    return _failed(message.id, _INVALID_REQUEST, _NO_SESSION, status_code=404)
                result = await _answer(episode, message.method, message.params or {})
        except _RpcError as error:
            return _failed(message.id, error.code, str(error))
        except EpisodeError as error:
            return _failed(message.id, _INTERNAL, str(error))
        answer = {"jsonrpc": "2.0", "id": message.id, "result": result}
        return JSONResponse(answer, headers=headers)

    async def end(self, request: Request) -> Response:
        if self._find(request) is None:
            return JSONResponse({"error": _NO_SESSION}, status_code=404)
        await self._episodes.close(request.headers[SESSION_HEADER])
        return Response(status_code=204)

    async def grade(self, request: Request) -> Response:
        episode = self._find(request)
        if episode is None:
            return JSONResponse({"error": _NO_SESSION}, status_code=404)
        return JSONResponse(await episode.grade())

    def _find(self, request: Request) -> Episode | None:
        session_id = request.headers.get(SESSION_HEADER, "")
        return self._episodes.find(session_id, request.path_params["task_key"])

    async def _initialize(
        self, request: Request, params: Mapping[str, Any]
    ) -> tuple[str, dict[str, Any]]:
        task_key = request.path_params["task_key"]
        if task_key not in self._tasks:
            near = get_close_matches(task_key, self._tasks, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {len(self._tasks)}"
            raise _RpcError(_INVALID_PARAMS, f"task {task_key!r} is unknown; {hint}")
        session_id, episode = await self._episodes.open(self._tasks[task_key])
        wishes = [said.text for said in episode.opening.messages if said.role == "user"]
        asked = params.get("protocolVersion")
        return session_id, {
            "protocolVersion": asked if asked in _VERSIONS else _VERSIONS[0],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": f"skyfleet-{episode.task.env_key}", "version": "1"},
            "instructions": "\n".join(wishes),
        }


async def _answer(episode: Episode, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
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
                    for tool in episode.opening.tools
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


def _failed(
    request_id: int | str | None, code: int, text: str, *, status_code: int = 200
) -> Response:
    error = {"jsonrpc": "2.0", "id": request_id, "error": {"code": code, "message": text}}
    return JSONResponse(error, status_code=status_code)
