"""Servers: where one of OpenAI's API answers, what it calls its model, and how much that takes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import httpx

from skyfleet.engines.http_client import bearer
from skyfleet.errors import ConfigError

ANSWER_SECONDS = 10
KEY_VARIABLE = "OPENAI_API_KEY"
_URLS = "generator.remote_inference_engine_urls"
_MODEL = "generator.served_model_name"


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    url: str
    """Up to where /completions begins."""
    model: str
    max_model_len: int | None = None
    """Tokens of a prompt with its turn; None where the server does not tell."""
    policy_version: int | None = None
    """The step whose weights it has; only ours tell."""


def read_key() -> str | None:
    """ConfigError for one that no header can carry."""
    key = os.environ.get(KEY_VARIABLE) or None
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"{KEY_VARIABLE} holds a line break or a letter outside ASCII, which no key has; "
            "copy it again"
        )
    return key


async def find_servers(
    addresses: Sequence[str], *, model: str | None, api_key: str | None, longest: int
) -> list[Server]:
    """One policy on all of them, which takes `longest` tokens; ConfigError otherwise."""
    for url, count in Counter(map(base_url, addresses)).items():
        if count > 1:
            raise ConfigError(f"{_URLS} names {url} {count} times; name each server once")
    servers = [await find_server(a, model=model, api_key=api_key) for a in addresses]
    if len({server.model for server in servers}) > 1:
        told = ", ".join(f"{server.model!r} at {server.url}" for server in servers)
        raise ConfigError(
            f"{_URLS} serve different models: {told}; they would be scored as one policy, so name "
            f"one that all have with {_MODEL}, or evaluate them one by one"
        )
    if len({server.policy_version for server in servers} - {None}) > 1:
        told = ", ".join(f"{server.policy_version} at {server.url}" for server in servers)
        raise ConfigError(
            f"{_URLS} serve different steps of a policy: {told}; they would be scored as one, so "
            "serve one step on all, or evaluate them one by one"
        )
    for server in servers:
        if server.max_model_len is not None and server.max_model_len < longest:
            raise ConfigError(
                f"{_URLS}: {server.url} takes {server.max_model_len} tokens, and an episode "
                f"{longest}: generator.max_input_length and a turn's max_generate_length; lower "
                "them, or serve the model with more"
            )
    return servers


async def find_server(address: str, *, model: str | None, api_key: str | None) -> Server:
    """`model` is what it must serve; None takes the only one it has. ConfigError otherwise."""
    url = base_url(address)
    named = f"{_URLS}: {url}"
    try:
        async with httpx.AsyncClient(headers=bearer(api_key), timeout=ANSWER_SECONDS) as client:
            response = await client.get(f"{url}/models")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(
            f"{named} does not answer ({type(error).__name__}); start the server, or correct the url"
        ) from error
    if response.is_error:
        way_out = _way_out(response.status_code, has_key=api_key is not None)
        raise ConfigError(f"{named}/models answered {response.status_code}; {way_out}")
    served = _models(response)
    if served is None:
        raise ConfigError(f"{named}/models answered no list of models; {_ELSEWHERE}")
    if model is not None and model not in served:
        raise ConfigError(
            f"{named} serves {list(served)}, not {_MODEL}={model!r}; name one of those"
        )
    if model is None and len(served) != 1:
        raise ConfigError(f"{named} serves {list(served)}; choose with {_MODEL}")
    name = model or next(iter(served))
    return replace(served[name], url=url)


def base_url(address: str) -> str:
    """`base_url("10.0.0.1:8000")` is http://10.0.0.1:8000/v1; a path that is given stays."""
    with_scheme = address if "://" in address else f"http://{address}"
    with_scheme = with_scheme.rstrip("/")
    host_and_path = with_scheme.partition("://")[2]
    return with_scheme if "/" in host_and_path else f"{with_scheme}/v1"


_ELSEWHERE = (
    "give the url up to where /models and /completions begin, such as http://host:port/v1, of vLLM "
    "or skyfleet serve"
)


def _way_out(status: int, *, has_key: bool) -> str:
    if status in (401, 403):
        return (
            f"it does not take the key in {KEY_VARIABLE}: set the server's own"
            if has_key
            else f"it wants a key: set {KEY_VARIABLE}"
        )
    return "try again when it is up, or read its log" if status >= 500 else _ELSEWHERE


def _models(response: httpx.Response) -> dict[str, Server] | None:
    """By name; None where no models are listed at all."""
    try:
        match response.json():
            case {"data": list() as models}:
                told = [one for one in models if isinstance(one, dict) and "id" in one]
                return {str(one["id"]): _model(one) for one in told}
    except ValueError:
        pass
    return None


def _model(told: Mapping[str, object]) -> Server:
    length, version = told.get("max_model_len"), told.get("policy_version")
    return Server(
        url="",
        model=str(told["id"]),
        max_model_len=length if isinstance(length, int) else None,
        policy_version=version if isinstance(version, int) else None,
    )
