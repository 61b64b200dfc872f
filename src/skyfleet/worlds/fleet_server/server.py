"""A Fleet-compatible server: embedded worlds behind the interface that fleet-python speaks.

It keeps everything in memory, one world database an instance, and lets nobody in without the key.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from skyfleet.errors import ConfigError, MissingExtraError
from skyfleet.tasks.task import Task
from skyfleet.worlds.fleet_server.http import RefusalError
from skyfleet.worlds.fleet_server.instances import Instances

try:
    from starlette.applications import Starlette
    from starlette.datastructures import Headers
    from starlette.middleware import Middleware
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from skyfleet.worlds.fleet_server.instance_routes import INSTANCES_PATH, instance_routes
    from skyfleet.worlds.fleet_server.service_routes import service_routes
except ModuleNotFoundError as error:
    raise MissingExtraError(error.name or "starlette", "serve") from error

logger = logging.getLogger(__name__)

_REAP_SECONDS = 1.0


def fleet_app(
    tasks: Sequence[Task], *, api_key: str, ttl_seconds: int = 900, max_instances: int = 1024
) -> Starlette:
    """An ASGI app that offers `tasks` and makes instances of any world.

    `app.state.instances` counts what was created and what was deleted.
    """
    if not api_key:
        raise ConfigError("api_key=''; choose a key, clients send it as FLEET_API_KEY")
    instances = Instances(ttl_seconds=ttl_seconds, most=max_instances)
    runner_token = secrets.token_urlsafe(24)

    @asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        reaping = asyncio.create_task(_reap(instances))
        try:
            yield
        finally:
            reaping.cancel()
            with suppress(asyncio.CancelledError):
                await reaping
            instances.close_all()

    app = Starlette(
        routes=[
            *service_routes(instances, tasks, runner_token=runner_token),
            *instance_routes(instances),
        ],
        middleware=[
            Middleware(_Keyed, api_key=api_key, runner_token=runner_token),
            Middleware(_Answered),
        ],
        exception_handlers={RefusalError: _refused, 404: _not_served},
        lifespan=life,
    )
    app.state.instances = instances
    return app


class _Keyed:
    """Lets in who has the key and, to instances only, who was given the runner token."""

    def __init__(self, app: ASGIApp, *, api_key: str, runner_token: str) -> None:
        self._app = app
        self._bearer, self._token = f"Bearer {api_key}".encode(), runner_token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._may_enter(scope):
            detail = "the Authorization header has not this server's key; send Bearer <api_key>"
            await JSONResponse({"detail": detail}, 401)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _may_enter(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        bearer = headers.get("authorization", "").encode()
        token = headers.get("x-runner-token", "").encode()
        return hmac.compare_digest(bearer, self._bearer) or (
            scope["path"].startswith(INSTANCES_PATH) and hmac.compare_digest(token, self._token)
        )


class _Answered:
    """Says by 400 what nobody foresaw: a 500 would be asked for again, with growing waits."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def note(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, note)
        except Exception as error:
            if begun or scope["type"] != "http":
                raise
            asked = f"{scope['method']} {scope['path']}"
            logger.exception("%s was answered with 400", asked)
            detail = f"{asked} failed with {type(error).__name__}; correct the request"
            await JSONResponse({"detail": detail}, 400)(scope, receive, send)


async def _reap(instances: Instances) -> None:
    while True:
        await asyncio.sleep(_REAP_SECONDS)
        instances.reap()


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusalError)
    return JSONResponse({"detail": error.detail}, error.status)


async def _not_served(request: Request, error: Exception) -> Response:
    """Status 400: a 404 would be asked for again, with growing waits."""
    detail = f"{request.method} {request.url.path} is not served here; episodes need no such route"
    return JSONResponse({"detail": detail}, 400)
