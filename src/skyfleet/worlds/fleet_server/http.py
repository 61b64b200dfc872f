"""HTTP errors and request bodies of the Fleet-compatible server."""

from __future__ import annotations
import json
from typing import Any, TypeVar
from pydantic import BaseModel, ValidationError
from starlette.requests import Request


class RefusalError(Exception):
    """Never status 404: fleet-python takes it for a hiccup and asks again and again."""

    def __init__(self, status: int, detail: str | dict[str, object]) -> None:
        super().__init__(detail)
        self.status, self.detail = status, detail


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
