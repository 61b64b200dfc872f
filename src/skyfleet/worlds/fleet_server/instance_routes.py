"""Instance routes: what a client asks of one instance, its databases and its tools."""

from __future__ import annotations

from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from skyfleet.worlds.fleet_server import databases, verification
from skyfleet.worlds.fleet_server import mcp_endpoint as mcp_answers
from skyfleet.worlds.fleet_server.instances import Instance, Instances
from skyfleet.worlds.fleet_server.http import read_body, read_json

INSTANCES_PATH = "/instances/"


def instance_routes(instances: Instances) -> list[Mount]:
    def found(request: Request) -> Instance:
        return instances.get(request.path_params["instance_id"])

    async def health(request: Request) -> Response:
        found(request)
        now = datetime.now(UTC).isoformat()
        return JSONResponse({"status": "healthy", "timestamp": now, "service": "skyfleet"})

    async def reset(request: Request) -> Response:
        found(request).reset()
        return JSONResponse({"success": True, "message": "the data is as seeded"})

    async def resources(request: Request) -> Response:
        found(request)
        return JSONResponse(databases.RESOURCES)

    async def describe(request: Request) -> Response:
        return JSONResponse(databases.describe(found(request), request.path_params["name"]))

    async def query(request: Request) -> Response:
        asked = await read_body(request, databases.QueryRequest)
        return JSONResponse(databases.query(found(request), request.path_params["name"], asked))

    async def difference(request: Request) -> Response:
        asked = await read_body(request, databases.DiffRequest)
        return JSONResponse(databases.difference(found(request), asked))

    async def verify(request: Request) -> Response:
        asked = await read_body(request, verification.RawRequest)
        return JSONResponse(await verification.execute_raw(found(request), asked))

    async def mcp(request: Request) -> Response:
        answer = mcp_answers.answer(found(request), await read_json(request))
        return Response(status_code=202) if answer is None else JSONResponse(answer)

    manager = [
        Route("/health", health),
        Route("/reset", reset, methods=["POST"]),
        Route("/resources", resources),
        Route("/resources/sqlite/{name}/describe", describe),
        Route("/resources/sqlite/{name}/query", query, methods=["POST"]),
        Route("/diff/structured", difference, methods=["POST"]),
        Route("/execute_verifier_function", verify, methods=["POST"]),
    ]
    routes = [
        Route("/mcp", mcp, methods=["POST"]),
        Route("/api/v1/mcp", mcp, methods=["POST"]),
        Mount("/api/v1/env", routes=manager),
    ]
    return [Mount(f"{INSTANCES_PATH}{{instance_id}}", routes=routes)]
