"""AgentGateway: a local server with OpenAI's API, to which each agent sends its requests."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from time import time
from typing import Any
from uuid import uuid4

from skyfleet.chat.message import Message
from skyfleet.engines.openai_messages import to_openai_turn
from skyfleet.errors import MissingExtraError
from skyfleet.serving.access import AccessPolicy
from skyfleet.serving.listening import build_uvicorn_config
from skyfleet.serving.requests import (
    CLIENT_CLOSED_REQUEST,
    ApiError,
    ChatCompletionRequest,
    cancel_on_disconnect,
    parse_request,
)

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route
except ImportError as error:
    raise MissingExtraError(error.name or "starlette", "serve") from None

MODEL = "policy"
"""The name under which agents ask for the policy."""
LOCAL_ACCESS = AccessPolicy()

RequestHandler = Callable[[ChatCompletionRequest], Coroutine[Any, Any, Message]]


class AgentGateway:
    """A local OpenAI API server for agents; it runs while any key is registered."""

    def __init__(self, access: AccessPolicy = LOCAL_ACCESS) -> None:
        self._access = access
        self._handlers: dict[str, RequestHandler] = {}
        self._server: LoopbackServer | None = None

    def register(self, handler: RequestHandler) -> tuple[str, str]:
        """The base URL and the key of a client whose requests go to `handler`."""
        if self._server is None or self._server.has_ended:
            routes = [
                Route("/v1/models", _list_models),
                Route("/v1/chat/completions", self._create_chat_completion, methods=["POST"]),
            ]
            self._server = LoopbackServer(Starlette(routes=routes), self._access)
        key = f"episode-{uuid4().hex}"
        self._handlers[key] = handler
        return f"{self._server.url}/v1", key

    async def unregister(self, key: str) -> None:
        """Unknown keys are ignored."""
        self._handlers.pop(key, None)
        if not self._handlers and self._server is not None:
            server, self._server = self._server, None
            await server.stop()

    async def _create_chat_completion(self, request: Request) -> Response:
        try:
            key = request.headers.get("authorization", "").removeprefix("Bearer ")
            handler = self._handlers.get(key)
            if handler is None:
                raise ApiError("no episode has this key, or the episode has ended", status=401)
            body = parse_request(await request.body(), ChatCompletionRequest, template_kwargs={})
            message = await cancel_on_disconnect(request, handler(body))
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except ApiError as error:
            return JSONResponse(error.body, error.status)
        fields = {"id": f"chatcmpl-{uuid4().hex}", "created": int(time()), "model": body.model}
        response = to_openai_turn(message)
        finish_reason = "tool_calls" if message.tool_calls else "stop"
        if body.stream:
            chunks = _stream_chunks(fields, response, finish_reason)
            return StreamingResponse(chunks, media_type="text/event-stream")
        choice = {"index": 0, "message": response, "finish_reason": finish_reason}
        # The run counts the tokens; clients expect the field.
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        return JSONResponse(
            {**fields, "object": "chat.completion", "choices": [choice], "usage": usage}
        )


async def _list_models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model"}]})


async def _stream_chunks(
    fields: dict[str, Any], response: dict[str, Any], finish_reason: str
) -> AsyncIterator[str]:
    """The whole response as one chunk, for clients that stream."""
    delta = dict(response)
    if calls := response.get("tool_calls"):
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
    choices: tuple[dict[str, Any], ...] = (
        {"delta": delta, "finish_reason": None},
        {"delta": {}, "finish_reason": finish_reason},
    )
    for choice in choices:
        chunk = {**fields, "object": "chat.completion.chunk", "choices": [{"index": 0, **choice}]}
        yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"


class LoopbackServer(uvicorn.Server):
    """An ASGI server on a free port of 127.0.0.1, inside the running event loop.

    By default clients need no token; an app that wants one checks it.
    """

    def __init__(self, app: Any, policy: AccessPolicy = LOCAL_ACCESS) -> None:
        super().__init__(build_uvicorn_config(app, policy, timeout_graceful_shutdown=1))
        self._stopping = asyncio.Event()
        # asyncio sets TCP_NODELAY only on a socket created with IPPROTO_TCP; without it every small
        # response takes 40 ms.
        self._listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._listening.bind(("127.0.0.1", 0))
        # Listen before uvicorn has started, so that clients can connect at once.
        self._listening.listen(1024)
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._serving = asyncio.create_task(self.serve(sockets=[self._listening]))

    @property
    def has_ended(self) -> bool:
        """True after `stop`, or if the event loop that started it has ended."""
        return self._serving.done()

    async def stop(self) -> None:
        """Disconnects the remaining clients."""
        self._stopping.set()
        await self._serving
        self._listening.close()

    async def main_loop(self) -> None:
        await self._stopping.wait()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves Ctrl-C to the process."""
        yield
