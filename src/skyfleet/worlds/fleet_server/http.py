"""HTTP errors and request bodies of the Fleet-compatible server."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

M = TypeVar("M", bound=BaseModel)


class HttpError(Exception):
    """An error response. Never use status 404: fleet-python retries it with growing delays."""

    def __init__(self, status: int, detail: str | dict[str, object]) -> None:
        super().__init__(detail)
        self.status, self.detail = status, detail


async def read_json(request: Request) -> Any:
    try:
        return json.loads(await request.body() or b"{}")
    except ValueError as error:
        raise HttpError(400, f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise HttpError(400, "the body is nested too deeply; reduce the nesting") from error


async def read_body(request: Request, model: type[M]) -> M:
    """Parse the JSON body as `model`; HttpError 400 names the first invalid field."""
    try:
        return model.model_validate(await read_json(request))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "the body"
        raise HttpError(400, f"{key}={first['input']!r:.100}; {first['msg']}") from error
