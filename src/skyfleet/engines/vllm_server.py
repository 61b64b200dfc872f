"""A vLLM server as a trainable Engine: its HTTP routes, its version and settings, weight updates."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from skyfleet.chat.transcript import Completion
from skyfleet.engines.http_client import CONNECT_SECONDS, RefusedError, bearer
from skyfleet.engines.openai_engine import OpenAIEngine
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.engines.versions import at_least
from skyfleet.engines.vllm_controller import FIRST_VLLM, WORKER_EXTENSION, VllmController
from skyfleet.errors import ConfigError, EngineError

STEERING_SECONDS = 900.0
"""For one call: a large model's weights may come from a slow disk."""

HEALTH_SECONDS = 10.0
_SHOWN_CHARACTERS = 300


class RouteError(Exception):
    """A route answered that it failed, or that there is none."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"{status}: {said}")
        self.status = status


class VllmRoutes:
    """`async with` closes its connections."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        """`url` ends where /v1 begins: http://localhost:8000."""
        self.url = url
        self._client = httpx.AsyncClient(
            base_url=url,
            headers=bearer(api_key),
            timeout=httpx.Timeout(STEERING_SECONDS, connect=CONNECT_SECONDS),
            # Minutes lie between two calls, and a connection that the server has closed fails.
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def sleep(self, *, level: int, mode: str) -> None:
        await self._ask("POST", "sleep", params={"level": level, "mode": mode})

    async def wake_up(self, tags: Sequence[str] = ()) -> None:
        """Without tags all of its memory, and its scheduler."""
        await self._ask("POST", "wake_up", params={"tags": list(tags)})

    async def is_sleeping(self) -> bool:
        """Or only paused."""
        answer = (await self._ask("GET", "is_sleeping")).json()
        return bool(answer["is_sleeping"])

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        await self._ask("POST", "pause", params={"mode": mode, "clear_cache": clear_cache})

    async def resume_generation(self) -> None:
        await self._ask("POST", "resume")

    async def reset_prefix_cache(self) -> None:
        """Not done while a turn runs, which 0.32 tells; what stays has its version in its keys."""
        await self._ask("POST", "reset_prefix_cache")

    async def collective_rpc(self, method: str, args: Sequence[Any] = ()) -> list[Any]:
        """None, mappings and lists come back as they are, all else as words."""
        body = {"method": method, "args": list(args)}
        answer = (await self._ask("POST", "collective_rpc", json=body)).json()
        results: list[Any] = answer["results"]
        return results

    async def data_parallel_size(self) -> int:
        """A worker of a dense model does not know it: its engine is told that it is alone."""
        answer = await self._ask("GET", "server_info")
        found = re.search(r"\bdata_parallel_size=(\d+)", answer.text)
        if found is None:
            raise RouteError(answer.status_code, "/server_info names no data_parallel_size")
        return int(found[1])

    async def version(self) -> str | None:
        """None for a server that is not vLLM."""
        try:
            answer = (await self._ask("GET", "version")).json()
        except ValueError:
            return None
        except RouteError as error:
            if error.status == httpx.codes.NOT_FOUND:
                return None
            raise
        version = answer.get("version") if isinstance(answer, dict) else None
        return version if isinstance(version, str) else None

    async def is_alive(self) -> bool:
        try:
            return (await self._client.get("health", timeout=HEALTH_SECONDS)).is_success
        except httpx.HTTPError:
            return False

    async def _ask(self, verb: str, route: str, **details: Any) -> httpx.Response:
        response = await self._client.request(verb, route, **details)
        if response.is_error:
            raise RouteError(response.status_code, _said(response))
        return response


def _said(response: httpx.Response) -> str:
    """vLLM's message, or the answer's beginning."""
    try:
        match response.json():
            case {"error": {"message": str(message)}} | {"error": str(message)}:
                return message[:_SHOWN_CHARACTERS]
    except ValueError:
        pass
    return response.text[:_SHOWN_CHARACTERS]


LOGPROBS_MODE = "processed_logprobs"


class VllmServerInfo(BaseModel):
    """`WeightUpdateExtension.skyfleet_about`'s answer."""

    model_config = ConfigDict(frozen=True)

    model_dtype: str
    logprobs_mode: str
    sleep_mode: bool
    quantization: str | None
    n_workers: int
    sizes: dict[str, Any]


async def ask_about(routes: VllmRoutes, named: str) -> VllmServerInfo:
    """ConfigError for a server that lacks what it is asked by."""
    version = await routes.version()
    if version is None or not at_least(version, FIRST_VLLM):
        runs = "is no vLLM" if version is None else f"runs vLLM {version}"
        raise ConfigError(
            f"{named} {runs}, and a server that is trained is vLLM {FIRST_VLLM} or newer; start one "
            "there, or train with generator.backend=embedded"
        )
    try:
        told, *_ = await routes.collective_rpc("skyfleet_about")
        return VllmServerInfo.model_validate(told)
    except RouteError as error:
        if error.status == httpx.codes.NOT_FOUND:
            raise ConfigError(
                f"{named} keeps its developer routes closed, by which weights come in; start it "
                "with VLLM_SERVER_DEV_MODE=1 in its environment"
            ) from error
        if "skyfleet_about" in str(error):
            raise ConfigError(
                f"{named} has no worker that takes weights; start it with --worker-extension-cls "
                f"{WORKER_EXTENSION}, and this skyfleet installed there"
            ) from error
        raise
    except ValidationError as error:
        key = ".".join(map(str, error.errors()[0]["loc"]))
        raise ConfigError(
            f"{named} has another skyfleet, which tells no {key} that can be read here; install "
            "this one there, and start it again"
        ) from error


def check_trainable(
    about: VllmServerInfo, named: str, *, n_replicas: int, sizes: Mapping[str, Any]
) -> None:
    """ConfigError where what it says could not be learnt from, or its weights not be proven.

    `sizes` are the learner's, `n_replicas` vLLM's data parallel size.
    """
    if about.logprobs_mode != LOGPROBS_MODE:
        raise ConfigError(
            f"{named} runs with --logprobs-mode {about.logprobs_mode}, which are not those that "
            f"tokens are drawn with; start it with --logprobs-mode {LOGPROBS_MODE}"
        )
    if about.quantization is not None:
        raise ConfigError(
            f"{named} runs with quantization {about.quantization}, and what it then holds is not "
            "what the learner sends; start it without"
        )
    if (about.n_workers, n_replicas) != (1, 1):
        raise ConfigError(
            f"{named} runs {about.n_workers} workers in each of {n_replicas} replicas, and weights "
            "can be proven in one alone; start a server for each GPU, with --tensor-parallel-size, "
            "--pipeline-parallel-size and --data-parallel-size 1, and name all of them"
        )
    for name, ours in sizes.items():
        if (theirs := about.sizes.get(name, ours)) != ours:
            raise ConfigError(
                f"{named} serves a model with {name}={theirs!r}, and the learner's has {ours!r}; "
                "start it from trainer.policy.model.path"
            )


class VllmServer(VllmController):
    # A handle is a pickle, and a route that asks for no key is no place for one.
    reads_memory = False
    way_out = "start it again, and the same command goes on from the newest checkpoint"

    def __init__(
        self, inner: OpenAIEngine, routes: VllmRoutes, *, sleeps: bool, model_dtype: str
    ) -> None:
        super().__init__(
            routes,
            name=f"vLLM at {routes.url}",
            # A sync follows every sleep, so the old weights need not be kept.
            sleep_level=2 if sleeps else 0,
            model_dtype=model_dtype,
        )
        self._inner = inner

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
    ) -> Completion:
        await self._ready()
        version = self.policy_version
        try:
            said = await self._inner.generate(
                token_ids, sampling, session=session, cache_salt=str(version)
            )
        except RefusedError:
            raise
        except EngineError as error:
            # A turn that fails is its episode's matter, unless all that follow would fail with it.
            await self._check_alive(f"{self.name} has died: {error}", error)
            raise
        # Asked again and again, it may have died and come up again meanwhile.
        self._check_not_lost()
        return replace(said, policy_version=version)

    async def _is_alive(self) -> bool:
        alive: bool = await self._llm.is_alive()
        return alive


async def open_vllm_server(
    inner: OpenAIEngine, routes: VllmRoutes, *, may_sleep: bool, sizes: Mapping[str, Any]
) -> VllmServer:
    """Awake, whatever a run before left it as. ConfigError names what it lacks to be trained.

    `sizes` are those of the learner's model.
    """
    named = f"generator.remote_inference_engine_urls: {routes.url}"
    try:
        about = await ask_about(routes, named)
        n_replicas = await routes.data_parallel_size()
        check_trainable(about, named, n_replicas=n_replicas, sizes=sizes)
        if await routes.is_sleeping():
            await routes.wake_up()
    except (httpx.HTTPError, RouteError) as error:
        raise ConfigError(
            f"{named} does not answer as it should ({type(error).__name__}: {error}); try again "
            "when it is up, or read its log"
        ) from error
    return VllmServer(
        inner,
        routes,
        sleeps=may_sleep and about.sleep_mode,
        model_dtype=about.model_dtype,
    )


async def refuse_asleep(routes: VllmRoutes) -> None:
    """ConfigError for a server that would keep whoever asks it for a turn waiting."""
    try:
        sleeps = await routes.is_sleeping()
    except (httpx.HTTPError, RouteError, ValueError):
        return  # its developer routes are closed: nobody has put it to sleep
    if sleeps:
        raise ConfigError(
            f"generator.remote_inference_engine_urls: {routes.url} is asleep or paused, as a run "
            "that trains it leaves it when it is broken off; train on, or start it again"
        )
