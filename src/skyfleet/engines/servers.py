"""Discover OpenAI-compatible servers: their URL, the model they serve and its context length."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import httpx

from skyfleet.engines.http_client import auth_header
from skyfleet.engines.response_body import InvalidBodyError, get
from skyfleet.errors import ConfigError

PROBE_TIMEOUT_SECONDS = 30.0
"""The default of generator.probe_timeout_seconds."""
PROBE_KEY = "generator.probe_timeout_seconds"
MAX_LIST_BYTES = 1 << 22
"""Of a list of models; that of an aggregator of all providers has 1 MB."""
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
    model_names: frozenset[str] = frozenset()
    """All names under which it serves the same weights; vLLM answers with the first of them."""
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
    addresses: Sequence[str],
    *,
    model: str | None,
    api_key: str | None,
    longest: int,
    timeout_seconds: float = PROBE_TIMEOUT_SECONDS,
) -> list[Server]:
    """ConfigError unless all servers serve one policy with a context of at least `longest`
    tokens."""
    for url, count in Counter(map(base_url, addresses)).items():
        if count > 1:
            raise ConfigError(f"{_URLS} lists {url} {count} times; list each server once")
    servers = [
        await discover_server(
            address, model=model, api_key=api_key, timeout_seconds=timeout_seconds
        )
        for address in addresses
    ]
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


async def discover_server(
    address: str,
    *,
    model: str | None,
    api_key: str | None,
    timeout_seconds: float = PROBE_TIMEOUT_SECONDS,
) -> Server:
    """Query one server for `model`, or for its only model if that is None.

    ConfigError otherwise.
    """
    url = base_url(address)
    named = f"{_URLS}: {url}"
    served = await list_models(url, api_key=api_key, timeout_seconds=timeout_seconds, named=named)
    if model is not None and model not in served:
        raise ConfigError(
            f"{named} serves {list(served)}, not {_MODEL}={model!r}; choose one of those"
        )
    if model is None and len(served) != 1:
        raise ConfigError(f"{named} serves {list(served)}; choose with {_MODEL}")
    return replace(served[model or next(iter(served))], url=url)


async def list_models(
    url: str, *, api_key: str | None, timeout_seconds: float, named: str
) -> dict[str, Server]:
    """The models of a server by name, without its url; ConfigError, which calls it `named`."""
    headers = {"Accept-Encoding": "identity", **auth_header(api_key)}
    try:
        async with (
            asyncio.timeout(timeout_seconds),
            httpx.AsyncClient(headers=headers, timeout=timeout_seconds) as client,
        ):
            response = await get(client, f"{url}/models", max_bytes=MAX_LIST_BYTES)
    except InvalidBodyError as error:
        raise ConfigError(f"{named}/models {error}; {_URL_FORMAT}") from error
    except (TimeoutError, httpx.TimeoutException) as error:
        raise ConfigError(
            f"{named} did not answer within {timeout_seconds:g} s ({PROBE_KEY}); start the server, "
            "correct the url, or raise the key"
        ) from error
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        raise ConfigError(
            f"{named} does not respond ({type(error).__name__}); start the server, or correct the url"
        ) from error
    if not response.is_success:
        remedy = _remedy(response.status, has_key=api_key is not None)
        raise ConfigError(f"{named}/models returned {response.status}; {remedy}")
    served = _parse_models(response.json())
    if served is None:
        raise ConfigError(f"{named}/models returned no list of models; {_URL_FORMAT}")
    return served


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


def _parse_models(answer: object) -> dict[str, Server] | None:
    """Servers by model name; None if the answer lists no models at all."""
    match answer:
        case {"data": list() as models}:
            entries = [entry for entry in models if isinstance(entry, dict) and "id" in entry]
            return {str(entry["id"]): _parse_model(entry, entries) for entry in entries}
    return None


def _parse_model(entry: Mapping[str, object], entries: Sequence[Mapping[str, object]]) -> Server:
    length, version, root = (entry.get(key) for key in ("max_model_len", "policy_version", "root"))
    aliases = [other for other in entries if root is not None and other.get("root") == root]
    return Server(
        url="",
        model=str(entry["id"]),
        model_names=frozenset(str(other["id"]) for other in (entry, *aliases)),
        max_model_len=length if isinstance(length, int) else None,
        policy_version=version if isinstance(version, int) else None,
    )
