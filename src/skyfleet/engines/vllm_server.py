"""VllmServer: a trainable vLLM server: HTTP routes, server info, weight updates."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version as package_version
from typing import Any, Self

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from skyfleet.chat.transcript import Completion
from skyfleet.engines.http_client import CONNECT_SECONDS, RequestRejectedError, auth_header
from skyfleet.engines.openai_engine import OpenAIEngine
from skyfleet.engines.response_body import (
    ERROR_BYTES,
    InvalidBodyError,
    Response,
    get,
    send_request,
    show_text,
)
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.engines.servers import PROBE_KEY, PROBE_TIMEOUT_SECONDS
from skyfleet.engines.vllm_controller import LOGPROBS_MODE, WORKER_EXTENSION, VllmController
from skyfleet.engines.vllm_versions import MIN_TRAINABLE_VLLM, is_at_least
from skyfleet.errors import ConfigError, EngineError

CONTROL_TIMEOUT_SECONDS = 900.0
"""For one control call: a large model's weights may come from a slow disk."""
HEALTH_TIMEOUT_SECONDS = 10.0
MAX_CONTROL_BYTES = 1 << 26
"""Of one response: the checksums of a large model take a few MiB."""


class RouteError(Exception):
    """A route returned an error status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class VllmRoutes:
    """Client of vLLM's control routes (developer mode); `async with` closes its connections."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        """`url` is the server's root, without /v1: http://localhost:8000."""
        self.url = url
        self._client = httpx.AsyncClient(
            base_url=url,
            headers=auth_header(api_key),
            timeout=httpx.Timeout(CONTROL_TIMEOUT_SECONDS, connect=CONNECT_SECONDS),
            # Calls are minutes apart: the server may have closed a kept connection.
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def sleep(self, *, level: int, mode: str) -> None:
        await self._ask("POST", "sleep", params={"level": level, "mode": mode})

    async def wake_up(self, tags: Sequence[str] = ()) -> None:
        """Without tags, wake all memory and the scheduler."""
        await self._ask("POST", "wake_up", params={"tags": list(tags)})

    async def is_sleeping(self) -> bool:
        """True if it sleeps or is paused."""
        response = await self._ask("GET", "is_sleeping")
        match response.json():
            case {"is_sleeping": bool() as is_sleeping}:
                return is_sleeping
        raise RouteError(response.status, f"/is_sleeping returned {response.shown}")

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        await self._ask("POST", "pause", params={"mode": mode, "clear_cache": clear_cache})

    async def resume_generation(self) -> None:
        await self._ask("POST", "resume")

    async def reset_prefix_cache(self) -> None:
        """vLLM skips it while a turn runs.

        Stale entries are harmless, as `cache_salt` has the version.
        """
        await self._ask("POST", "reset_prefix_cache")

    async def collective_rpc(self, method: str, args: Sequence[Any] = ()) -> list[Any]:
        """Results that are None, mappings or lists keep their type; others become strings."""
        body = {"method": method, "args": list(args)}
        response = await self._ask("POST", "collective_rpc", json=body)
        match response.json():
            case {"results": list() as results}:
                return results
        raise RouteError(response.status, f"/collective_rpc returned {response.shown}")

    async def data_parallel_size(self) -> int:
        """Read from /server_info, because a worker of a dense model does not know it."""
        answer = await self._ask("GET", "server_info")
        found = re.search(r"\bdata_parallel_size=(\d+)", answer.text)
        if found is None:
            raise RouteError(answer.status, "/server_info has no data_parallel_size")
        return int(found[1])

    async def version(self) -> str | None:
        """The vLLM version; None for a server that is not vLLM."""
        try:
            answer = (await self._ask("GET", "version")).json()
        except RouteError as error:
            if error.status == httpx.codes.NOT_FOUND:
                return None
            raise
        version = answer.get("version") if isinstance(answer, dict) else None
        return version if isinstance(version, str) else None

    async def is_alive(self) -> bool:
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_SECONDS):
                return (await get(self._client, "health", max_bytes=ERROR_BYTES)).is_success
        except (httpx.HTTPError, InvalidBodyError, TimeoutError):
            return False

    async def _ask(self, verb: str, route: str, **details: Any) -> Response:
        request = self._client.build_request(verb, route, **details)
        try:
            async with asyncio.timeout(CONTROL_TIMEOUT_SECONDS):
                response = await send_request(self._client, request, max_bytes=MAX_CONTROL_BYTES)
        except InvalidBodyError as error:
            raise RouteError(httpx.codes.OK, f"/{route} {error}") from error
        except TimeoutError:
            raise httpx.ReadTimeout(f"no response in {CONTROL_TIMEOUT_SECONDS:g} s") from None
        if not response.is_success:
            raise RouteError(response.status, _error_message(response))
        return response


def _error_message(response: Response) -> str:
    """vLLM's error message, or the start of the response."""
    match response.json():
        case {"error": {"message": str(message)}} | {"error": str(message)}:
            return show_text(message)
    return show_text(response.text)


class VllmServerInfo(BaseModel):
    """The result of `WeightUpdateExtension.skyfleet_about`."""

    model_config = ConfigDict(frozen=True)

    model_dtype: str
    logprobs_mode: str
    sleep_mode: bool
    quantization: str | None
    n_workers: int
    sizes: dict[str, Any]


async def query_server_info(routes: VllmRoutes, named: str) -> VllmServerInfo:
    """ConfigError for a server that is too old, or that lacks developer mode or the worker
    extension."""
    version = await routes.version()
    if version is None or not is_at_least(version, MIN_TRAINABLE_VLLM):
        runs = "is not a vLLM server" if version is None else f"runs vLLM {version}"
        raise ConfigError(
            f"{named} {runs}, but training needs vLLM {MIN_TRAINABLE_VLLM} or newer; start one "
            "there, or train with generator.backend=embedded"
        )
    try:
        info, *_ = await routes.collective_rpc("skyfleet_about")
        return VllmServerInfo.model_validate(info)
    except RouteError as error:
        if error.status == httpx.codes.NOT_FOUND:
            raise ConfigError(
                f"{named} runs without developer routes, which weight updates need; start it with "
                "VLLM_SERVER_DEV_MODE=1 in its environment"
            ) from error
        if "skyfleet_about" in str(error):
            raise ConfigError(
                f"{named} runs without skyfleet's worker extension; install skyfleet there and start "
                f"it with --worker-extension-cls {WORKER_EXTENSION}"
            ) from error
        raise
    except ValidationError as error:
        key = ".".join(map(str, error.errors()[0]["loc"]))
        raise ConfigError(
            f"{named} runs an incompatible skyfleet worker extension (field {key} is missing or "
            f"invalid); install skyfleet {package_version('skyfleet')} there and restart it"
        ) from error


def check_trainable(
    info: VllmServerInfo, named: str, *, n_replicas: int, sizes: Mapping[str, Any]
) -> None:
    """ConfigError if its logprobs cannot be trained on, or its weights cannot be verified.

    `sizes` are those of the learner's model, `n_replicas` is vLLM's data parallel size.
    """
    if info.logprobs_mode != LOGPROBS_MODE:
        raise ConfigError(
            f"{named} runs with --logprobs-mode {info.logprobs_mode}, which is not the distribution "
            f"that tokens are sampled from; start it with --logprobs-mode {LOGPROBS_MODE}"
        )
    if info.quantization is not None:
        raise ConfigError(
            f"{named} runs with quantization {info.quantization}, so its weights would differ from "
            "the learner's; start it without"
        )
    if (info.n_workers, n_replicas) != (1, 1):
        raise ConfigError(
            f"{named} runs {info.n_workers} workers in each of {n_replicas} replicas, but weights "
            "can be verified in a single worker only; start one server per GPU, with "
            "--tensor-parallel-size, --pipeline-parallel-size and --data-parallel-size 1, and list "
            "all of them"
        )
    for name, ours in sizes.items():
        if (theirs := info.sizes.get(name, ours)) != ours:
            raise ConfigError(
                f"{named} serves a model with {name}={theirs!r}, but the learner's has {ours!r}; "
                "start it from trainer.policy.model.path"
            )


class VllmServer(VllmController):
    # IPC handles are pickles, which must not be sent to a route without authentication.
    supports_cuda_ipc = False
    remedy = "restart it, then run the same command to resume from the latest checkpoint"

    def __init__(
        self, inner: OpenAIEngine, routes: VllmRoutes, *, sleeps: bool, model_dtype: str
    ) -> None:
        super().__init__(
            routes,
            name=f"vLLM at {routes.url}",
            # A weight sync follows every sleep, so the old weights need not be kept.
            sleep_level=2 if sleeps else 0,
            model_dtype=model_dtype,
        )
        self._inner = inner

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
    ) -> Completion:
        await self._wait_ready()
        version = self.policy_version
        try:
            completion = await self._inner.generate(
                token_ids, sampling, session=session, cache_salt=str(version)
            )
        except RequestRejectedError:
            raise
        except EngineError as error:
            # A failed turn fails its episode only, unless the engine is dead.
            await self._check_alive(f"{self.name} is dead: {error}", error)
            raise
        # It may have died and restarted during the retries.
        self._check_not_dead()
        return replace(completion, policy_version=version)

    async def _is_alive(self) -> bool:
        alive: bool = await self._llm.is_alive()
        return alive


async def open_vllm_server(
    inner: OpenAIEngine,
    routes: VllmRoutes,
    *,
    may_sleep: bool,
    sizes: Mapping[str, Any],
    timeout_seconds: float = PROBE_TIMEOUT_SECONDS,
) -> VllmServer:
    """Check that a server can be trained, and wake it. ConfigError names what it lacks.

    `sizes` are those of the learner's model. All checks together have `timeout_seconds`.
    """
    named = f"generator.remote_inference_engine_urls: {routes.url}"
    try:
        async with asyncio.timeout(timeout_seconds):
            info = await query_server_info(routes, named)
            n_replicas = await routes.data_parallel_size()
            check_trainable(info, named, n_replicas=n_replicas, sizes=sizes)
            is_sleeping = await routes.is_sleeping()
        if is_sleeping:
            await routes.wake_up()
    except TimeoutError:
        raise _silent_error(named, timeout_seconds) from None
    except (httpx.HTTPError, RouteError) as error:
        raise ConfigError(
            f"{named} does not respond correctly ({type(error).__name__}: {error}); try again when it "
            "is up, or read its log"
        ) from error
    return VllmServer(
        inner,
        routes,
        sleeps=may_sleep and info.sleep_mode,
        model_dtype=info.model_dtype,
    )


async def reject_sleeping_server(
    routes: VllmRoutes, *, timeout_seconds: float = PROBE_TIMEOUT_SECONDS
) -> None:
    """ConfigError for a sleeping server, whose requests would wait forever."""
    try:
        async with asyncio.timeout(timeout_seconds):
            is_sleeping = await routes.is_sleeping()
    except TimeoutError:
        named = f"generator.remote_inference_engine_urls: {routes.url}"
        raise _silent_error(named, timeout_seconds) from None
    except (httpx.HTTPError, RouteError):
        return  # without developer routes, nothing can have put it to sleep
    if is_sleeping:
        raise ConfigError(
            f"generator.remote_inference_engine_urls: {routes.url} is asleep or paused, probably by "
            "an interrupted training run; resume that run, or restart the server"
        )


def _silent_error(named: str, timeout_seconds: float) -> ConfigError:
    return ConfigError(
        f"{named} did not answer within {timeout_seconds:g} s ({PROBE_KEY}); restart it, or raise "
        "the key"
    )
