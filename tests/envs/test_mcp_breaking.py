"""MCP servers that answer late or at length: no answer is taken for another one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from mcp import McpError
from mcp.server.fastmcp import FastMCP
from mcp.types import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    CallToolRequest,
    ErrorData,
    ServerResult,
)
from tests.fakes.counter_env import TASK
from tests.fakes.serving import serving

from skyfleet.chat.message import Message, ToolCall
from skyfleet.envs.mcp.client import MCPSettings, mcp_factory
from skyfleet.envs.mcp.grading import FinishedEpisode
from skyfleet.errors import EnvError


async def _unknown(played: FinishedEpisode) -> None: ...


def _says(name: str, **arguments: Any) -> Message:
    call = ToolCall(id="c0", name=name, arguments=arguments)
    return Message(role="assistant", tool_calls=(call,))


async def test_the_late_answer_of_a_cancelled_call_is_discarded() -> None:
    server = FastMCP("late")

    @server.tool()
    async def echo(text: str, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return text

    async with serving(server.streamable_http_app()) as url:
        env = await mcp_factory(MCPSettings(url=f"{url}/mcp", grade=_unknown))(TASK)
        await env.reset()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await env.step(_says("echo", text="late", seconds=0.3))
        for seconds in (0.4, 0.0):
            step = await env.step(_says("echo", text="own", seconds=seconds))
            assert [reply.text for reply in step.messages] == ["own"]
        await env.close()


@pytest.mark.parametrize("code", [INVALID_PARAMS, INTERNAL_ERROR])
async def test_a_long_error_is_cut_like_any_other_result(code: int) -> None:
    async def refuse(request: CallToolRequest) -> ServerResult:
        raise McpError(ErrorData(code=code, message="a" * 50_000))

    server = FastMCP("refusing")
    server._mcp_server.request_handlers[CallToolRequest] = refuse
    async with serving(server.streamable_http_app()) as url:
        env = await mcp_factory(MCPSettings(url=f"{url}/mcp", grade=_unknown))(TASK)
        await env.reset()
        if code == INVALID_PARAMS:
            (reply,) = (await env.step(_says("add"))).messages
            note = "a\n(cut: the first 20,000 of 50,007 characters; ask for less)"
            assert reply.text.endswith(note)
        else:
            with pytest.raises(EnvError, match=r"a\n\(cut: the first 1,000 of 50,000"):
                await env.step(_says("add"))
        await env.close()
