"""Discover OpenAI-compatible servers: their URL, the model they serve and its context length."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import httpx

from skyfleet.engines.http_client import auth_header
from skyfleet.errors import ConfigError

DISCOVERY_TIMEOUT_SECONDS = 10
KEY_VARIABLE = "OPENAI_API_KEY"
_URLS = "generator.remote_inference_engine_urls"
_MODEL = "generator.served_model_name"


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    url: str
    """The base URL, without /completions."""
    model: str
    max_model_len: int | None = None
    """Tokens of a prompt with its turn; None if the server does not report it."""
    policy_version: int | None = None
    """The training step of its weights; only `skyfleet serve` reports it."""


def read_api_key() -> str | None:
    """Read the API key from the environment; ConfigError for one that no HTTP header can carry."""
    key = os.environ.get(KEY_VARIABLE) or None
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"{KEY_VARIABLE} contains a line break or a non-ASCII character, so it is not a valid "
            "key; copy it again"
        )
    return key


async def discover_servers(
    addresses: Sequence[str], *, model: str | None, api_key: str | None, longest: int
) -> list[Server]:
    """ConfigError unless all servers serve one policy with a context of at least `longest`
    tokens."""
    for url, count in Counter(map(base_url, addresses)).items():
        if count > 1:
            raise ConfigError(f"{_URLS} lists {url} {count} times; list each server once")
    servers = [await discover_server(a, model=model, api_key=api_key) for a in addresses]
    if len({server.model for server in servers}) > 1:
        listed = ", ".join(f"{server.model!r} at {server.url}" for server in servers)
        raise ConfigError(
            f"{_URLS} serve different models: {listed}; they would be evaluated as one policy, so "
            f"select one that all serve with {_MODEL}, or evaluate them one by one"
        )
    if len({server.policy_version for server in servers} - {None}) > 1:
        listed = ", ".join(f"{server.policy_version} at {server.url}" for server in servers)
        raise ConfigError(
            f"{_URLS} serve different steps of a policy: {listed}; they would be evaluated as one, "
            "so serve the same step on all, or evaluate them one by one"
        )
    for server in servers:
        if server.max_model_len is not None and server.max_model_len < longest:
            raise ConfigError(
                f"{_URLS}: {server.url} supports {server.max_model_len} tokens, but "
                f"generator.max_input_length + max_generate_length={longest}; lower them, or serve "
                "the model with a longer context"
            )
    return servers


async def discover_server(address: str, *, model: str | None, api_key: str | None) -> Server:
    """Query one server for `model`, or for its only model if that is None.

    ConfigError otherwise.
    """
    url = base_url(address)
    named = f"{_URLS}: {url}"
    try:
        async with httpx.AsyncClient(
            headers=auth_header(api_key), timeout=DISCOVERY_TIMEOUT_SECONDS
        ) as client:
            response = await client.get(f"{url}/models")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(
            f"{named} does not respond ({type(error).__name__}); start the server, or correct the url"
        ) from error
    if response.is_error:
        remedy = _remedy(response.status_code, has_key=api_key is not None)
        raise ConfigError(f"{named}/models returned {response.status_code}; {remedy}")
    served = _parse_models(response)
    if served is None:
        raise ConfigError(f"{named}/models returned no list of models; {_URL_FORMAT}")
    if model is not None and model not in served:
        raise ConfigError(
            f"{named} serves {list(served)}, not {_MODEL}={model!r}; choose one of those"
        )
    if model is None and len(served) != 1:
        raise ConfigError(f"{named} serves {list(served)}; choose with {_MODEL}")
    name = model or next(iter(served))
    return replace(served[name], url=url)


def base_url(address: str) -> str:
    """`base_url("10.0.0.1:8000")` is http://10.0.0.1:8000/v1; a given path is kept."""
    with_scheme = address if "://" in address else f"http://{address}"
    with_scheme = with_scheme.rstrip("/")
    host_and_path = with_scheme.partition("://")[2]
    return with_scheme if "/" in host_and_path else f"{with_scheme}/v1"


_URL_FORMAT = (
    "use the base url without /models or /completions, such as http://host:port/v1, of vLLM or "
    "skyfleet serve"
)


def _remedy(status: int, *, has_key: bool) -> str:
    if status in (401, 403):
        return (
            f"it does not accept the key in {KEY_VARIABLE}: set the server's own"
            if has_key
            else f"it requires a key: set {KEY_VARIABLE}"
        )
    return "try again when it is up, or read its log" if status >= 500 else _URL_FORMAT


def _parse_models(response: httpx.Response) -> dict[str, Server] | None:
    """Servers by model name; None if the response lists no models at all."""
    try:
        match response.json():
            case {"data": list() as models}:
                entries = [entry for entry in models if isinstance(entry, dict) and "id" in entry]
                return {str(entry["id"]): _parse_model(entry) for entry in entries}
    except ValueError:
        pass
    return None


def _parse_model(entry: Mapping[str, object]) -> Server:
    length, version = entry.get("max_model_len"), entry.get("policy_version")
    return Server(
        url="",
        model=str(entry["id"]),
        max_model_len=length if isinstance(length, int) else None,
        policy_version=version if isinstance(version, int) else None,
    )
