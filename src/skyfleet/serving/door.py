"""Door: a chat endpoint of this process, behind which each key's questions are answered elsewhere."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Coroutine
from time import time
from typing import Any
from uuid import uuid4

from skyfleet.chat.message import Message
from skyfleet.engines.openai_messages import written_turn
from skyfleet.errors import MissingExtraError
from skyfleet.serving.bodies import ChatBody, read_body
from skyfleet.serving.leaving import unless_gone
from skyfleet.serving.loopback import Loopback
from skyfleet.serving.refusal import RefusalError, error_body

try:
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route
except ImportError:
    raise MissingExtraError("starlette", "serve") from None

MODEL = "policy"
Ask = Callable[[ChatBody], Coroutine[Any, Any, Message]]


class Door:
    """Open while anybody has a key."""

    def __init__(self) -> None:
        self._asks: dict[str, Ask] = {}
        self._server: Loopback | None = None

    def admit(self, ask: Ask) -> tuple[str, str]:
        """The base URL and the key of a client whose every question goes to `ask`."""
        if self._server is None or self._server.has_ended:
            routes = [
                Route("/v1/models", _models),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ]
            self._server = Loopback(Starlette(routes=routes))
        key = f"episode-{uuid4().hex}"
        self._asks[key] = ask
        return f"{self._server.url}/v1", key

    async def leave(self, key: str) -> None:
        """Unknown keys are fine."""
        self._asks.pop(key, None)
        if not self._asks and self._server is not None:
            server, self._server = self._server, None
            await server.stop()

    async def _chat(self, request: Request) -> Response:
        try:
            ask = self._asks.get(request.headers.get("authorization", "").removeprefix("Bearer "))
            if ask is None:
                raise RefusalError("no episode has this key, or it is over", status=401)
            body = read_body(await request.body(), ChatBody, template_kwargs={})
            message = await unless_gone(request, ask(body))
        except ClientDisconnect:
            return Response(status_code=499)
        except RefusalError as error:
            refusal = error_body(
                str(error), status=error.status, param=error.param, code=error.code
            )
            return JSONResponse(refusal, error.status)
        fields = {"id": f"chatcmpl-{uuid4().hex}", "created": int(time()), "model": body.model}
        written = written_turn(message)
        finish = "tool_calls" if message.tool_calls else "stop"
        if body.stream:
            return StreamingResponse(
                _chunks(fields, written, finish), media_type="text/event-stream"
            )
        choice = {"index": 0, "message": written, "finish_reason": finish}
        # The run counts the tokens; clients that add them up find nothing to add.
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        answer = {**fields, "object": "chat.completion", "choices": [choice], "usage": usage}
        return JSONResponse(answer)


async def _models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model"}]})


async def _chunks(
    fields: dict[str, Any], written: dict[str, Any], finish: str
) -> AsyncIterator[str]:
    """All of it at once: a program that streams gets its stream."""
    delta = dict(written)
    if calls := written.get("tool_calls"):
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
    for choice in ({"delta": delta, "finish_reason": None}, {"delta": {}, "finish_reason": finish}):
        chunk = {**fields, "object": "chat.completion.chunk", "choices": [{"index": 0, **choice}]}
        yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"
