"""MCP answers: JSON-RPC messages to an instance's tools, and what it says to each."""

from __future__ import annotations

import sqlite3
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from skyfleet.envs.tools import ToolError
from skyfleet.worlds.fleet_server.instances import Instance
from skyfleet.worlds.formatting import show

_PROTOCOL = "2025-06-18"
_INVALID_REQUEST, _NO_METHOD, _INVALID_PARAMS = -32600, -32601, -32602


class Call(BaseModel):
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


def answer(instance: Instance, message: object) -> dict[str, Any] | None:
    """The response, or None where the message wants none."""
    if not isinstance(message, dict) or not isinstance(message.get("method"), str):
        return _failed(None, _INVALID_REQUEST, "send one JSON-RPC object with a method")
    if "id" not in message:
        return None
    params = message.get("params") or {}
    if not isinstance(params, dict):
        said = f"params={params!r:.100}; send an object"
        return _failed(message["id"], _INVALID_PARAMS, said)
    match message["method"]:
        case "initialize":
            result = _introduction(params)
        case "ping":
            result = {}
        case "tools/list":
            result = {"tools": _tools(instance)}
        case "tools/call":
            try:
                result = _called(instance, Call.model_validate(params))
            except ValidationError as error:
                return _failed(message["id"], _INVALID_PARAMS, str(error))
        case method:
            return _failed(message["id"], _NO_METHOD, f"no method {method!r}")
    return {"jsonrpc": "2.0", "id": message["id"], "result": result}


def _introduction(params: dict[str, Any]) -> dict[str, Any]:
    return {
        "protocolVersion": params.get("protocolVersion", _PROTOCOL),
        "capabilities": {"tools": {}},
        "serverInfo": {"name": "skyfleet", "version": "1"},
    }


def _tools(instance: Instance) -> list[dict[str, Any]]:
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


def _called(instance: Instance, call: Call) -> dict[str, Any]:
    try:
        text = show(instance.world.toolkit.call(instance.app, call.name, call.arguments))
    except ToolError as error:
        return _content(str(error), is_error=True)
    except sqlite3.Error as error:
        # A client may have rewritten the very tables that the tool works on.
        return _content(f"{call.name} failed: {error}; reset the instance", is_error=True)
    return _content(text, is_error=False)


def _content(text: str, *, is_error: bool) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": text}], "isError": is_error}


def _failed(message_id: object, code: int, text: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": message_id, "error": {"code": code, "message": text}}
