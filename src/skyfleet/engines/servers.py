"""Servers: where one of OpenAI's API answers, and what it calls its model."""

from __future__ import annotations

from dataclasses import dataclass

import httpx

from skyfleet.engines.posting import bearer
from skyfleet.errors import ConfigError

ANSWER_SECONDS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    url: str
    """Up to where /completions begins."""
    model: str


async def find_server(address: str, *, model: str | None, api_key: str | None) -> Server:
    """`model` is what it must serve; None takes the only one it has. ConfigError otherwise."""
    url = base_url(address)
    named = f"generator.remote_inference_engine_urls: {url}"
    try:
        async with httpx.AsyncClient(headers=bearer(api_key), timeout=ANSWER_SECONDS) as client:
            response = await client.get(f"{url}/models")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(
            f"{named} does not answer ({type(error).__name__}); start the server, or correct the url"
        ) from error
    if response.is_error:
        key = "; it wants a key: set OPENAI_API_KEY" if response.status_code in (401, 403) else ""
        raise ConfigError(f"{named}/models answered {response.status_code}{key}")
    served = _names(response)
    if model is not None and model not in served:
        raise ConfigError(f"{named} serves {served}, not generator.served_model_name={model!r}")
    if model is None and len(served) != 1:
        raise ConfigError(f"{named} serves {served}; choose with generator.served_model_name")
    return Server(url=url, model=model or served[0])


def base_url(address: str) -> str:
    """`base_url("10.0.0.1:8000")` is http://10.0.0.1:8000/v1; a path that is given stays."""
    with_scheme = address if "://" in address else f"http://{address}"
    with_scheme = with_scheme.rstrip("/")
    host_and_path = with_scheme.partition("://")[2]
    return with_scheme if "/" in host_and_path else f"{with_scheme}/v1"


def _names(response: httpx.Response) -> list[str]:
    try:
        match response.json():
            case {"data": list() as models}:
                return [str(one["id"]) for one in models if isinstance(one, dict) and "id" in one]
    except ValueError:
        pass
    return []
