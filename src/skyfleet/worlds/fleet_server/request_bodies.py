"""Bodies: the JSON of a request, checked against what the route reads."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from skyfleet.worlds.fleet_server.errors import RefusalError

M = TypeVar("M", bound=BaseModel)


async def read_json(request: Request) -> Any:
    try:
        return json.loads(await request.body() or b"{}")
    except ValueError as error:
        raise RefusalError(400, f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise RefusalError(400, "the body is nested too deeply; send it flatter") from error


async def read_body(request: Request, model: type[M]) -> M:
    try:
        return model.model_validate(await read_json(request))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "the body"
        raise RefusalError(400, f"{key}={first['input']!r:.100}; {first['msg']}") from error
