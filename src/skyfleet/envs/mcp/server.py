"""Our envs as MCP servers for other agents: `/{task_key}/mcp` for every task.

`initialize` opens an episode and gives the wish as its instructions. `GET /{task_key}/grade` with
the same `Mcp-Session-Id` ends it and tells its grade. DELETE, or idling too long, closes it; the
app's lifespan must run, for it closes what nobody closed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from skyfleet.envs.env import EnvFactory
from skyfleet.envs.mcp.served import Episode, Episodes
from skyfleet.errors import EpisodeError, MissingExtraError
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
