"""VllmAbout: what a vLLM server tells of itself, and whether it can be trained as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from skyfleet.engines.versions import at_least
from skyfleet.engines.vllm_routes import RouteError, VllmRoutes
from skyfleet.engines.vllm_settings import FIRST_VLLM, WORKER_EXTENSION
from skyfleet.errors import ConfigError

LOGPROBS_MODE = "processed_logprobs"


class VllmAbout(BaseModel):
    """`WeightDoor.skyfleet_about`'s answer."""

    model_config = ConfigDict(frozen=True)

    model_dtype: str
    logprobs_mode: str
    sleep_mode: bool
    quantization: str | None
    n_workers: int
    sizes: dict[str, Any]


async def ask_about(routes: VllmRoutes, named: str) -> VllmAbout:
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
        return VllmAbout.model_validate(told)
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
    about: VllmAbout, named: str, *, n_replicas: int, sizes: Mapping[str, Any]
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
