"""A chat endpoint that plays users: it says one line per conversation turn, or dies after so many."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.fakes.broken_http import Connection, HttpRequest, broken_http


@dataclass(slots=True)
class UserEndpoint:
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)


@asynccontextmanager
async def user_endpoint(*lines: str, dies_after: int | None = None) -> AsyncIterator[UserEndpoint]:
    """Answer with the lines in the order of a conversation, the last one for ever; 7 prompt tokens and 3
    sampled ones each. After `dies_after` requests every connection is cut."""
    endpoint = UserEndpoint()

    async def behave(request: HttpRequest, connection: Connection) -> bool:
        endpoint.requests.append(request.body)
        if dies_after is not None and len(endpoint.requests) > dies_after:
            connection.reset()
            return False
        turn = sum(one["role"] == "assistant" for one in request.body["messages"])
        message = {"role": "assistant", "content": lines[min(turn, len(lines) - 1)]}
        answer = {
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
            "usage": {"prompt_tokens": 7, "completion_tokens": 3},
        }
        await connection.respond(json.dumps(answer).encode())
        return True

    async with broken_http(behave) as root:
        endpoint.url = f"{root}/v1"
        yield endpoint
