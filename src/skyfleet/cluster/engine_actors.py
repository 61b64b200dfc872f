"""Engine actors: an engine with weights of its own in the process of a Ray actor."""

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass
from typing import Any

import torch

from skyfleet.chat.renderers import build_renderer
from skyfleet.chat.transcript import Completion
from skyfleet.cluster.messages import make_portable
from skyfleet.config.root import RunConfig
from skyfleet.engines.engine import Engine
from skyfleet.engines.factory import build_embedded_engine
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.engines.vllm_controller import VllmSettings
from skyfleet.errors import EpisodeError, ModelError
from skyfleet.models.hf_decoder import make_decoder
from skyfleet.weight_transfer.receiver import WeightReceiver
from skyfleet.weight_transfer.targets import ModuleWeights
from skyfleet.weight_transfer.transports import Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What a model is built from without its weights, which the learner sends."""

    module_type: type
    config: Any
    """A Hugging Face configuration."""
    tokenizer: Any
    dtype: torch.dtype

    def build(self, device: torch.device) -> torch.nn.Module:
        with device:
            module: torch.nn.Module = self.module_type(self.config)
        module.to(device=device, dtype=self.dtype).requires_grad_(False)
        return module.eval()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """A receiver's place in a transfer group."""

    address: str
    rank: int
    world_size: int
    backend: Backend
    timeout_seconds: float


class _EngineActor:
    """Every method is a coroutine of the actor's event loop, on which the engine runs."""

    _engine: Engine

    async def start(self) -> int:
        return os.getpid()

    async def ping(self) -> None: ...

    async def generate(
        self, token_ids: array[int], sampling: SamplingParams, session: str
    ) -> Completion:
        try:
            return await self._engine.generate(token_ids.tolist(), sampling, session=session)
        except EpisodeError as error:
            raise make_portable(error) from None

    async def release(self, session: str) -> None:
        await self._engine.release(session)

    async def sleep(self) -> None:
        await self._engine.sleep()

    async def wake(self) -> None:
        await self._engine.wake()


class EmbeddedEngineActor(_EngineActor):
    """The engine of skyfleet: on a GPU the CUDA engine, otherwise the portable one."""

    def __init__(self, config: RunConfig, shape: ModelShape) -> None:
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if config.trainer.device == "cpu":
            self._device = torch.device("cpu")
        self._module = shape.build(self._device)
        decoder = make_decoder(self._module, max_positions=config.max_episode_tokens)
        renderer = build_renderer(config.generator, shape.tokenizer)
        self._engine = build_embedded_engine(config, decoder, renderer)
        self._receiver: WeightReceiver | None = None

    async def join(self, place: GroupPlace) -> None:
        """Become a receiver of a new transfer group."""
        await self.leave()
        self._receiver = WeightReceiver(
            place.address,
            rank=place.rank,
            world_size=place.world_size,
            backend=place.backend,
            device=self._device,
            timeout_seconds=place.timeout_seconds,
        )

    async def receive_weights(self, policy_version: int) -> None:
        """Blocks the event loop: no token is sampled from weights of two versions."""
        if self._receiver is None:
            raise ModelError("the engine is in no transfer group; open a new one")
        self._receiver.receive(ModuleWeights(self._module), version=policy_version)
        self._engine.policy_version = policy_version

    async def leave(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None


class VllmEngineActor(_EngineActor):
    """vLLM over the GPUs of the actor. Weights arrive as for a vLLM in the driver's process."""

    def __init__(
        self, config: RunConfig, model_path: str, settings: VllmSettings, tokenizer: Any
    ) -> None:
        self._path, self._settings = model_path, settings
        self._renderer = build_renderer(config.generator, tokenizer)

    async def start(self) -> int:
        from skyfleet.engines.vllm_engine import open_vllm_engine

        self._engine = self._vllm = await open_vllm_engine(
            self._path, self._settings, decode_text=self._renderer.text
        )
        return os.getpid()

    async def collective_rpc(self, method: str, *arguments: Any) -> list[Any]:
        return await self._vllm.collective_rpc(method, *arguments)

    async def update_weights(self, method: str, argument: str | bytes, policy_version: int) -> None:
        await self._vllm.update_weights(method, argument, policy_version=policy_version)
