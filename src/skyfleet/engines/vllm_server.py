"""VllmServer: vLLM as a server that is trained: it sleeps, wakes and takes weights over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx

from skyfleet.chat.completion import Completion
from skyfleet.engines.openai_engine import OpenAIEngine
from skyfleet.engines.posting import RefusedError
from skyfleet.engines.sampling import SamplingParams
from skyfleet.engines.versions import at_least
from skyfleet.engines.vllm_routes import RouteError, VllmRoutes
from skyfleet.engines.vllm_settings import FIRST_VLLM, WORKER_EXTENSION
from skyfleet.engines.vllm_steering import SteeredVllm
from skyfleet.errors import ConfigError, EngineError, ModelError, SentinelError

LOGPROBS_MODE = "processed_logprobs"


class VllmServer(SteeredVllm):
    # A handle is a pickle, and a route that asks for no key is no place for one.
    reads_memory = False

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
        self._given = ""
        """The file that its weights came from last."""

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
            if await self._llm.is_alive():
                raise
            raise ModelError(
                f"{self.name} has died: {error}; its own last lines say why: start it again, and "
                "the same command goes on from the newest checkpoint"
            ) from error
        return replace(said, policy_version=version)

    async def load(self, method: str, argument: str | bytes, *, policy_version: int) -> None:
        """SentinelError where somebody else has changed its weights since the last time."""
        if self._given and {self._given} != set(await self.ask("skyfleet_given")):
            raise SentinelError(
                f"{self.name} was started again since the last sync, or another run gave it weights: "
                "what it said in this step is not the policy's; leave it to this run, and the same "
                "command goes on from the newest checkpoint"
            )
        await super().load(method, argument, policy_version=policy_version)
        self._given = str(argument)


async def open_vllm_server(
    speaker: OpenAIEngine, routes: VllmRoutes, *, may_sleep: bool
) -> VllmServer:
    """Awake, whatever a run before left it as. ConfigError names what it lacks to be trained."""
    named = f"generator.remote_inference_engine_urls: {routes.url}"
    try:
        about = await _about(routes, named)
        if await routes.is_sleeping():
            await routes.wake_up()
    except (httpx.HTTPError, RouteError) as error:
        raise ConfigError(
            f"{named} does not answer as it should ({type(error).__name__}: {error}); read its log"
        ) from error
    if about["logprobs_mode"] != LOGPROBS_MODE:
        raise ConfigError(
            f"{named} runs with --logprobs-mode {about['logprobs_mode']}, which are not those that "
            f"tokens are drawn with; start it with --logprobs-mode {LOGPROBS_MODE}"
        )
    return VllmServer(
        speaker,
        routes,
        sleeps=may_sleep and about["sleep_mode"],
        model_dtype=about["model_dtype"],
    )


async def _about(routes: VllmRoutes, named: str) -> dict[str, Any]:
    """What WeightDoor says of the vLLM that it is in."""
    version = await routes.version()
    if version is None or not at_least(version, FIRST_VLLM):
        runs = "is no vLLM" if version is None else f"runs vLLM {version}"
        raise ConfigError(
            f"{named} {runs}, and a server that is trained is vLLM {FIRST_VLLM} or newer; start one "
            "there, or train with generator.backend=embedded"
        )
    try:
        about, *_ = await routes.collective_rpc("skyfleet_about")
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
    told: dict[str, Any] = about
    return told
