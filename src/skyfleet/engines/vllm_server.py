"""VllmServer: a trainable vLLM server: its checks at the start, generation, weight updates."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version as package_version
from typing import Any

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from skyfleet.chat.transcript import Completion
from skyfleet.engines.http_client import RequestRejectedError
from skyfleet.engines.openai_engine import OpenAIEngine
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.engines.servers import PROBE_KEY, PROBE_TIMEOUT_SECONDS
from skyfleet.engines.vllm_controller import LOGPROBS_MODE, WORKER_EXTENSION, VllmController
from skyfleet.engines.vllm_routes import RouteError, VllmRoutes
from skyfleet.engines.vllm_versions import MIN_TRAINABLE_VLLM, is_at_least
from skyfleet.errors import ConfigError, EngineError


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
        results = await routes.collective_rpc("skyfleet_about")
        return VllmServerInfo.model_validate(results[0] if results else None)
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
        key = ".".join(map(str, error.errors()[0]["loc"])) or "sizes"
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
