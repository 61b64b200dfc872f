"""Service routes: what a client asks of Fleet itself, before and beside its instances."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from skyfleet.tasks.task import Task
from skyfleet.worlds.catalog import WORLD_NAMES
from skyfleet.worlds.fleet_server import listings, verification
from skyfleet.worlds.fleet_server.http import RefusalError
from skyfleet.worlds.fleet_server.instances import Instances, MakeRequest
from skyfleet.worlds.fleet_server.http import read_body


def service_routes(
    instances: Instances, tasks: Sequence[Task], *, runner_token: str
) -> list[Route]:
    offered = listings.Tasks(tasks)

    async def token(request: Request) -> Response:
        return JSONResponse({"token": runner_token})

    return [
        Route("/v1/runner-auth/token", token),
        *_instance_routes(instances),
        *_listing_routes(instances, offered),
        *_verifier_routes(instances, offered),
    ]


def _instance_routes(instances: Instances) -> list[Route]:
    async def make(request: Request) -> Response:
        asked = await read_body(request, MakeRequest)
        made = instances.make(asked, request.headers.get("x-request-id"))
        return JSONResponse(listings.instance(made, str(request.base_url)))

    async def show_all(request: Request) -> Response:
        run_id = request.query_params.get("run_id")
        listed = [one for one in instances if run_id in (None, one.request.run_id)]
        return JSONResponse([listings.instance(one, str(request.base_url)) for one in listed])

    async def show(request: Request) -> Response:
        found = instances.get(request.path_params["instance_id"])
        return JSONResponse(listings.instance(found, str(request.base_url)))

    async def heartbeat(request: Request) -> Response:
        found = instances.get(request.path_params["instance_id"])
        found.hear()
        return JSONResponse(listings.heartbeat(found))

    async def close(request: Request) -> Response:
        found = instances.get(request.path_params["instance_id"])
        instances.close(found)
        return JSONResponse(listings.instance(found, str(request.base_url), status="stopped"))

    async def close_run(request: Request) -> Response:
        run_id = request.query_params.get("run_id")
        if run_id is None:
            raise RefusalError(400, "run_id is missing; name the run whose instances to close")
        closed = [one for one in instances if one.request.run_id == run_id]
        for one in closed:
            instances.close(one)
        base_url = str(request.base_url)
        return JSONResponse([listings.instance(one, base_url, status="stopped") for one in closed])

    return [
        Route("/v1/env/instances", make, methods=["POST"]),
        Route("/v1/env/instances", show_all),
        Route("/v1/env/instances/batch", close_run, methods=["DELETE"]),
        Route("/v1/env/instances/{instance_id}", show),
        Route("/v1/env/instances/{instance_id}", close, methods=["DELETE"]),
        Route("/v1/env/instances/{instance_id}/heartbeat", heartbeat, methods=["POST"]),
    ]


def _listing_routes(instances: Instances, tasks: listings.Tasks) -> list[Route]:
    async def worlds(request: Request) -> Response:
        return JSONResponse([listings.world(name) for name in WORLD_NAMES])

    async def world(request: Request) -> Response:
        return JSONResponse(listings.world(request.path_params["env_key"]))

    async def regions(request: Request) -> Response:
        return JSONResponse(["local"])

    async def account(request: Request) -> Response:
        return JSONResponse(listings.account(len(tuple(instances)), instances.limit))

    async def all_tasks(request: Request) -> Response:
        asked = request.query_params
        rows = tasks.chosen(env_key=asked.get("env_key"), keys=asked.getlist("task_keys"))
        return JSONResponse({"tasks": rows, "total": len(rows)})

    async def task(request: Request) -> Response:
        return JSONResponse(tasks.row(request.path_params["key"]))

    return [
        Route("/v1/env/", worlds),
        Route("/v1/env/{env_key}", world),
        Route("/v1/regions", regions),
        Route("/v1/account", account),
        Route("/v1/tasks", all_tasks),
        Route("/v1/tasks/{key}", task),
    ]


def _verifier_routes(instances: Instances, tasks: listings.Tasks) -> list[Route]:
    sources = verification.Sources()

    async def check(request: Request) -> Response:
        return JSONResponse({"success": request.query_params.get("sha256", "") in sources})

    async def execute(request: Request) -> Response:
        asked = await read_body(request, verification.ExecuteRequest)
        instance = instances.get(verification.instance_id(asked))
        spoken, code = verification.said(asked), sources.find(asked)
        answer = await verification.execute(instance, code, spoken, timeout_seconds=asked.timeout)
        return JSONResponse(answer)

    async def show(request: Request) -> Response:
        return JSONResponse(tasks.verifier(request.path_params["key"]))

    return [
        Route("/v1/verifiers/check", check),
        Route("/v1/verifiers/execute", execute, methods=["POST"]),
        Route("/v1/verifiers/{key}", show),
    ]
