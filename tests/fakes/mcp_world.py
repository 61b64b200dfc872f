"""A world as somebody's MCP server on stdio: tools, and its database as two resources."""

from __future__ import annotations

import asyncio
import os
import sys
from base64 import b64encode
from typing import Any

from mcp import types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

from skyfleet.envs.tools import ToolError
from skyfleet.worlds.catalog import get_world
from skyfleet.worlds.toolkit import show


async def serve(name: str, data_seed: int) -> None:
    world = get_world(name)
    app = world.open(data_seed, world.variables(data_seed))

    async def list_tools(request: types.ListToolsRequest) -> types.ServerResult:
        tools = [
            types.Tool(name=s.name, description=s.description, inputSchema=dict(s.parameters))
            for s in world.toolkit.specs
        ]
        return types.ServerResult(types.ListToolsResult(tools=tools))

    async def call_tool(request: types.CallToolRequest) -> types.ServerResult:
        arguments = request.params.arguments or {}
        if arguments.get("number") == 404:
            os.write(sys.stderr.fileno(), b"the world ends here")
            os._exit(1)
        try:
            text, refused = show(world.toolkit.call(app, request.params.name, arguments)), False
        except ToolError as error:
            text, refused = str(error), True
        content: list[types.ContentBlock] = [types.TextContent(type="text", text=text)]
        return types.ServerResult(types.CallToolResult(content=content, isError=refused))

    async def read_resource(request: types.ReadResourceRequest) -> types.ServerResult:
        uri = request.params.uri
        image = app.db.image() if str(uri) == "state://current" else world.image(data_seed)
        blob = types.BlobResourceContents(uri=uri, blob=b64encode(image).decode())
        return types.ServerResult(types.ReadResourceResult(contents=[blob]))

    server: Server[Any, Any] = Server("world", instructions="Be brief.")
    server.request_handlers[types.ListToolsRequest] = list_tools
    server.request_handlers[types.CallToolRequest] = call_tool
    server.request_handlers[types.ReadResourceRequest] = read_resource
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
