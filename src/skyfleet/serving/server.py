"""The server: an engine and its words behind OpenAI's API, as an ASGI app."""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from skyfleet.chat.renderer import Renderer
from skyfleet.engines.engine import Engine
from skyfleet.engines.http_client import RefusedError
from skyfleet.engines.openai_engine import SESSION_HEADER
from skyfleet.errors import EngineError, MissingExtraError
from skyfleet.serving.completions import chat, complete
from skyfleet.serving.model_service import ModelService, GenerationService
from skyfleet.serving.requests import ApiError, build_error, cancel_on_disconnect

try:
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route
except ImportError:
    raise MissingExtraError("starlette", "serve") from None

Work = Callable[[bytes, str | None], Coroutine[Any, Any, dict[str, Any] | AsyncIterator[str]]]

_GONE = 499
"""Nobody reads it: the client went away."""


def serve_app(
    engine: Engine,
    renderer: Renderer,
    *,
    encode: Callable[[str], list[int]],
    model: str,
    max_model_len: int,
    api_key: str | None = None,
    max_sessions: int = 1024,
    template_kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> Starlette:
    """`encode` reads the text prompts of /v1/completions. With `api_key` all of /v1 wants it.

    `template_kwargs` are those that `renderer` was made with.
    """
    generation = GenerationService(engine, renderer, max_sessions=max_sessions)
    served = ModelService(
        renderer,
        generation,
        encode=encode,
        model=model,
        max_model_len=max_model_len,
        template_kwargs=template_kwargs,
    )
    gateway = ApiHandler(served, api_key)

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(generation.counters.text(engine.policy_version))

    return Starlette(
        routes=[
            Route("/health", _health),
            Route("/metrics", metrics),
            Route("/v1/models", gateway.models),
            Route("/v1/chat/completions", gateway.chat, methods=["POST"]),
            Route("/v1/completions", gateway.complete, methods=["POST"]),
        ],
        exception_handlers={404: _unknown, 405: _unknown},
    )


async def _health(request: Request) -> Response:
    return Response()


async def _unknown(request: Request, error: Exception) -> Response:
    message = f"{request.method} {request.url.path} is not served here"
    return JSONResponse(build_error(message, status=404), 404)


class ApiHandler:
    """Lets in who has the key, tells errors as OpenAI does, and stops work nobody waits for."""

    def __init__(self, served: ModelService, api_key: str | None) -> None:
        self._served = served
        self._bearer = None if api_key is None else f"Bearer {api_key}".encode()

    async def models(self, request: Request) -> Response:
        return await self._counted(request, lambda raw, session: self._served.models())

    async def chat(self, request: Request) -> Response:
        return await self._counted(request, partial(chat, self._served))

    async def complete(self, request: Request) -> Response:
        return await self._counted(request, partial(complete, self._served))

    async def _counted(self, request: Request, work: Work) -> Response:
        response = await self._answered(request, work)
        self._served.generation.counters.requests[request.url.path, response.status_code] += 1
        return response

    async def _answered(self, request: Request, work: Work) -> Response:
        try:
            self._check_key(request)
            raw, session = await request.body(), request.headers.get(SESSION_HEADER)
            answer = await cancel_on_disconnect(request, work(raw, session))
        except ApiError as error:
            body = build_error(str(error), status=error.status, param=error.param, code=error.code)
            return JSONResponse(body, error.status)
        except EngineError as error:
            status = 400 if isinstance(error, RefusedError) else 500
            return JSONResponse(build_error(str(error), status=status), status)
        except ClientDisconnect:
            return Response(status_code=_GONE)
        if isinstance(answer, dict):
            return JSONResponse(answer)
        return StreamingResponse(answer, media_type="text/event-stream")

    def _check_key(self, request: Request) -> None:
        sent = request.headers.get("authorization", "").encode()
        if self._bearer is not None and not hmac.compare_digest(sent, self._bearer):
            raise ApiError(
                "the Authorization header has not this server's key; send Bearer <api_key>",
                status=401,
                code="invalid_api_key",
            )
