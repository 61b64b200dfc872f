"""VllmServer: vLLM as a server that is trained: it sleeps, wakes and takes weights over HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx

from skyfleet.chat.completion import Completion
from skyfleet.engines.openai_engine import OpenAIEngine
from skyfleet.engines.posting import RefusedError
from skyfleet.engines.sampling import SamplingParams
from skyfleet.engines.vllm_about import ask_about, check_trainable
from skyfleet.engines.vllm_routes import RouteError, VllmRoutes
from skyfleet.engines.vllm_steering import SteeredVllm
from skyfleet.errors import ConfigError, EngineError


class VllmServer(SteeredVllm):
    # A handle is a pickle, and a route that asks for no key is no place for one.
    reads_memory = False
    way_out = "start it again, and the same command goes on from the newest checkpoint"

    def __init__(
        self, speaker: OpenAIEngine, routes: VllmRoutes, *, sleeps: bool, model_dtype: str
    ) -> None:
        super().__init__(
            routes,
            name=f"vLLM at {routes.url}",
            # A sync follows every sleep, so the old weights need not be kept.
            sleep_level=2 if sleeps else 0,
            model_dtype=model_dtype,
        )
        self._speaker = speaker

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
    ) -> Completion:
        await self._ready()
        version = self.policy_version
        try:
            said = await self._speaker.generate(
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
    speaker: OpenAIEngine, routes: VllmRoutes, *, may_sleep: bool, sizes: Mapping[str, Any]
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
        speaker,
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
