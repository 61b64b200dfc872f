"""An ASGI app that serves an engine through OpenAI's API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from skyfleet.chat.renderer import Renderer
from skyfleet.engines.engine import Engine, HasDecoder
from skyfleet.engines.http_client import RequestRejectedError
from skyfleet.engines.openai_engine import SESSION_HEADER
from skyfleet.errors import EngineError, MissingExtraError
from skyfleet.serving.access import has_bearer_token
from skyfleet.serving.completions import create_chat_completion, create_completion
from skyfleet.serving.generation import GenerationService
from skyfleet.serving.model_service import ModelService
from skyfleet.serving.openai_responses import create_response
from skyfleet.serving.requests import (
    CLIENT_CLOSED_REQUEST,
    ApiError,
    build_error,
    cancel_on_disconnect,
)

try:
    from prometheus_client import CONTENT_TYPE_LATEST
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route
except ImportError as error:
    raise MissingExtraError(error.name or "starlette", "serve") from None

Endpoint = Callable[[bytes, str | None], Coroutine[Any, Any, dict[str, Any] | AsyncIterator[str]]]
"""From the body and the client's session name to a response or its server-sent events."""


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
    """`encode` tokenizes the text prompts of /v1/completions. `api_key` protects all of /v1.

    `template_kwargs` are those that `renderer` was built with.
    """
    generation = GenerationService(engine, renderer, max_idle_sessions=max_sessions)
    service = ModelService(
        renderer,
        generation,
        encode=encode,
        model=model,
        max_model_len=max_model_len,
        template_kwargs=template_kwargs,
        vocab_size=engine.decoder.vocab_size if isinstance(engine, HasDecoder) else None,
    )
    handler = ApiHandler(service, api_key)

    async def metrics(request: Request) -> Response:
        return Response(generation.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return Starlette(
        routes=[
            Route("/health", _health),
            Route("/metrics", metrics),
            Route("/v1/models", handler.list_models),
            Route("/v1/chat/completions", handler.create_chat_completion, methods=["POST"]),
            Route("/v1/responses", handler.create_response, methods=["POST"]),
            Route("/v1/completions", handler.create_completion, methods=["POST"]),
        ],
        exception_handlers={404: _not_found, 405: _not_found},
    )


async def _health(request: Request) -> Response:
    return Response()


async def _not_found(request: Request, error: Exception) -> Response:
    message = f"{request.method} {request.url.path} is not served here"
    return JSONResponse(build_error(message, status=404), 404)


class ApiHandler:
    """Checks the API key, reports errors in OpenAI's format, and cancels abandoned requests."""

    def __init__(self, service: ModelService, api_key: str | None) -> None:
        self._service = service
        self._api_key = api_key

    async def list_models(self, request: Request) -> Response:
        return await self._handle(request, lambda raw, session: self._service.list_models())

    async def create_chat_completion(self, request: Request) -> Response:
        return await self._handle(request, partial(create_chat_completion, self._service))

    async def create_response(self, request: Request) -> Response:
        return await self._handle(request, partial(create_response, self._service))

    async def create_completion(self, request: Request) -> Response:
        return await self._handle(request, partial(create_completion, self._service))

    async def _handle(self, request: Request, endpoint: Endpoint) -> Response:
        response = await self._respond(request, endpoint)
        self._service.generation.metrics.requests[request.url.path, response.status_code] += 1
        return response

    async def _respond(self, request: Request, endpoint: Endpoint) -> Response:
        try:
            self._check_key(request)
            raw, session = await request.body(), request.headers.get(SESSION_HEADER)
            result = await cancel_on_disconnect(request, endpoint(raw, session))
        except ApiError as error:
            return JSONResponse(error.body, error.status)
        except EngineError as error:
            status = 400 if isinstance(error, RequestRejectedError) else 500
            return JSONResponse(build_error(str(error), status=status), status)
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        if isinstance(result, dict):
            return JSONResponse(result)
        return StreamingResponse(result, media_type="text/event-stream")

    def _check_key(self, request: Request) -> None:
        key = self._api_key
        if key is not None and not has_bearer_token(request.headers.raw, key):
            raise ApiError(
                "the Authorization header does not contain this server's key; "
                "send Bearer <api_key>",
                status=401,
                code="invalid_api_key",
            )
