"""A Fleet-compatible HTTP server: the built-in worlds behind the API that fleet-python uses.

State is in memory, one world database per instance. Every request needs the API key.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from skyfleet.errors import ConfigError, MissingExtraError
from skyfleet.serving.access import find_values, has_bearer_token
from skyfleet.tasks.task import Task

try:
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from skyfleet.worlds.fleet_server.http import HttpError
    from skyfleet.worlds.fleet_server.instance_routes import INSTANCES_PATH, build_instance_routes
    from skyfleet.worlds.fleet_server.instances import InstancePool
    from skyfleet.worlds.fleet_server.service_routes import build_service_routes
except ModuleNotFoundError as error:
    raise MissingExtraError(error.name or "starlette", "serve") from error

logger = logging.getLogger(__name__)

_EXPIRY_CHECK_SECONDS = 1.0


def build_fleet_app(
    tasks: Sequence[Task], *, api_key: str, ttl_seconds: int = 900, max_instances: int = 1024
) -> Starlette:
    """Build an ASGI app that lists `tasks` and creates instances of any world.

    `app.state.instances` counts created and deleted instances.
    """
    if not api_key:
        raise ConfigError("api_key is empty; set one, which clients send as FLEET_API_KEY")
    instances = InstancePool(ttl_seconds=ttl_seconds, max_instances=max_instances)
    runner_token = secrets.token_urlsafe(24)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        expiry = asyncio.create_task(_close_expired_forever(instances))
        try:
            yield
        finally:
            expiry.cancel()
            with suppress(asyncio.CancelledError):
                await expiry
            instances.close_all()

    app = Starlette(
        routes=[
            *build_service_routes(instances, tasks, runner_token=runner_token),
            *build_instance_routes(instances),
        ],
        middleware=[
            Middleware(_ApiKeyMiddleware, api_key=api_key, runner_token=runner_token),
            Middleware(_UnexpectedErrorMiddleware),
        ],
        exception_handlers={HttpError: _to_response, 404: _unknown_route},
        lifespan=lifespan,
    )
    app.state.instances = instances
    return app


class _ApiKeyMiddleware:
    """Requires the API key, or, for instance routes, the runner token."""

    def __init__(self, app: ASGIApp, *, api_key: str, runner_token: str) -> None:
        self._app = app
        self._api_key, self._runner_token = api_key, runner_token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_authorized(scope):
            detail = "the Authorization header lacks this server's key; send Bearer <api_key>"
            await JSONResponse({"detail": detail}, 401)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_authorized(self, scope: Scope) -> bool:
        if has_bearer_token(scope["headers"], self._api_key):
            return True
        tokens = find_values(scope["headers"], b"x-runner-token")
        return (
            scope["path"].startswith(INSTANCES_PATH)
            and len(tokens) == 1
            and hmac.compare_digest(tokens[0], self._runner_token)
        )


class _UnexpectedErrorMiddleware:
    """Answers an unexpected exception with 400: clients retry a 500 with growing delays."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def send_and_note(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except Exception as error:
            if started or scope["type"] != "http":
                raise
            route = f"{scope['method']} {scope['path']}"
            logger.exception("%s was answered with 400", route)
            detail = f"{route} failed with {type(error).__name__}; correct the request"
            await JSONResponse({"detail": detail}, 400)(scope, receive, send)


async def _close_expired_forever(instances: InstancePool) -> None:
    while True:
        await asyncio.sleep(_EXPIRY_CHECK_SECONDS)
        instances.close_expired()


async def _to_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, HttpError)
    return JSONResponse({"detail": error.detail}, error.status)


async def _unknown_route(request: Request, error: Exception) -> Response:
    """Answer with 400: clients retry a 404 with growing delays."""
    detail = (
        f"{request.method} {request.url.path} is not supported by this server; "
        "episodes do not need it"
    )
    return JSONResponse({"detail": detail}, 400)
