"""Routes of one instance: health, reset, databases, verifier, and its tools as an MCP endpoint."""

from __future__ import annotations

import sqlite3
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from skyfleet.envs.tools import ToolError
from skyfleet.worlds.fleet_server import databases, verification
from skyfleet.worlds.fleet_server.http import read_body, read_json
from skyfleet.worlds.fleet_server.instances import Instance, InstancePool
from skyfleet.worlds.toolkit import show

INSTANCES_PATH = "/instances/"
_PROTOCOL = "2025-06-18"
_INVALID_REQUEST, _NO_METHOD, _INVALID_PARAMS = -32600, -32601, -32602


def build_instance_routes(instances: InstancePool) -> list[Mount]:
    def find(request: Request) -> Instance:
        return instances.get(request.path_params["instance_id"])

    async def health(request: Request) -> Response:
        find(request)
        now = datetime.now(UTC).isoformat()
        return JSONResponse({"status": "healthy", "timestamp": now, "service": "skyfleet"})

    async def reset(request: Request) -> Response:
        find(request).reset()
        return JSONResponse({"success": True, "message": "the data is reset to the seed"})

    async def resources(request: Request) -> Response:
        find(request)
        return JSONResponse(databases.RESOURCES)

    async def describe(request: Request) -> Response:
        return JSONResponse(databases.describe(find(request), request.path_params["name"]))

    async def query(request: Request) -> Response:
        body = await read_body(request, databases.QueryRequest)
        return JSONResponse(databases.query(find(request), request.path_params["name"], body))

    async def difference(request: Request) -> Response:
        body = await read_body(request, databases.DiffRequest)
        return JSONResponse(databases.difference(find(request), body))

    async def verify(request: Request) -> Response:
        body = await read_body(request, verification.RawRequest)
        return JSONResponse(await verification.execute_raw(find(request), body))

    async def mcp(request: Request) -> Response:
        response = handle_mcp_message(find(request), await read_json(request))
        return Response(status_code=202) if response is None else JSONResponse(response)

    manager = [
        Route("/health", health),
        Route("/reset", reset, methods=["POST"]),
        Route("/resources", resources),
        Route("/resources/sqlite/{name}/describe", describe),
        Route("/resources/sqlite/{name}/query", query, methods=["POST"]),
        Route("/diff/structured", difference, methods=["POST"]),
        Route("/execute_verifier_function", verify, methods=["POST"]),
    ]
    routes = [
        Route("/mcp", mcp, methods=["POST"]),
        Route("/api/v1/mcp", mcp, methods=["POST"]),
        Mount("/api/v1/env", routes=manager),
    ]
    return [Mount(f"{INSTANCES_PATH}{{instance_id}}", routes=routes)]


class ToolCallParams(BaseModel):
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


def handle_mcp_message(instance: Instance, message: object) -> dict[str, Any] | None:
    """Return the JSON-RPC response, or None if the message is a notification."""
    if not isinstance(message, dict) or not isinstance(message.get("method"), str):
        return _error(None, _INVALID_REQUEST, "send one JSON-RPC object with a method")
    if "id" not in message:
        return None
    params = message.get("params") or {}
    if not isinstance(params, dict):
        return _error(message["id"], _INVALID_PARAMS, f"params={params!r:.100}; send an object")
    match message["method"]:
        case "initialize":
            result = _initialize(params)
        case "ping":
            result = {}
        case "tools/list":
            result = {"tools": _list_tools(instance)}
        case "tools/call":
            try:
                result = _call_tool(instance, ToolCallParams.model_validate(params))
            except ValidationError as error:
                return _error(message["id"], _INVALID_PARAMS, str(error))
        case method:
            return _error(message["id"], _NO_METHOD, f"no method {method!r}")
    return {"jsonrpc": "2.0", "id": message["id"], "result": result}


def _initialize(params: dict[str, Any]) -> dict[str, Any]:
    return {
        "protocolVersion": params.get("protocolVersion", _PROTOCOL),
        "capabilities": {"tools": {}},
        "serverInfo": {"name": "skyfleet", "version": "1"},
    }


def _list_tools(instance: Instance) -> list[dict[str, Any]]:
    toolkit = instance.world.toolkit
    return [
        {
            "name": spec.name,
            "description": spec.description,
            "inputSchema": spec.parameters,
            "annotations": {"readOnlyHint": spec.name not in toolkit.writing},
        }
        for spec in toolkit.specs
    ]


def _call_tool(instance: Instance, call: ToolCallParams) -> dict[str, Any]:
    try:
        text = show(instance.world.toolkit.call(instance.app, call.name, call.arguments))
    except ToolError as error:
        return _text_content(str(error), is_error=True)
    except sqlite3.Error as error:
        # A client may have rewritten the tables that the tool reads.
        return _text_content(f"{call.name} failed: {error}; reset the instance", is_error=True)
    return _text_content(text, is_error=False)


def _text_content(text: str, *, is_error: bool) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": text}], "isError": is_error}


def _error(message_id: object, code: int, text: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": message_id, "error": {"code": code, "message": text}}
