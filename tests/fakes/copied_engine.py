"""What stands for vLLM where it is not needed: an engine of ours with weights of its own.

Sleeping, waking and pushing take a moment, as they do where another process has to answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack

import pytest
import torch
from torch import Tensor

from skyfleet.chat.renderer import Renderer
from skyfleet.config.root import RunConfig
from skyfleet.engines.embedded import EmbeddedEngine
from skyfleet.engines.engine import Engine
from skyfleet.learner.learner import Learner
from skyfleet.models.decoder import Decoder
from skyfleet.models.loading import load_model
from skyfleet.trainer import policy_client, preflight
from skyfleet.weight_sync import vllm

VLLM = ("generator.backend=vllm", "data.val_data=[]")
happened: list[str] = []


async def a_moment() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


class Copied(EmbeddedEngine):
    path: str
    weights: dict[str, Tensor]

    async def sleep(self) -> None:
        await a_moment()
        happened.append("sleep")

    async def wake(self) -> None:
        await a_moment()
        happened.append("wake")

    async def close(self) -> None:
        happened.append("close")


async def start(
    config: RunConfig, path: str, renderer: Renderer, opened: AsyncExitStack, *, learns: bool
) -> list[Engine]:
    engines: list[Engine] = []
    for _ in range(config.generator.num_inference_engines):
        loaded = load_model(path, dtype=torch.float32, device=torch.device("cpu"), config_kwargs={})
        decoder = Decoder(loaded.module, max_positions=1100)
        engine = Copied(decoder, decode_text=renderer.text, max_num_seqs=16, capacity=1100)
        engine.path, engine.weights = path, loaded.module.state_dict()
        opened.push_async_callback(engine.close)
        engines.append(engine)
        happened.append("start")
    return engines


class CopySync:
    def __init__(
        self,
        weights: Callable[[], Iterable[tuple[str, Tensor]]],
        *,
        folder: str | None,
        deltas: object = None,
    ) -> None:
        self._weights = weights

    async def push(self, learner: Learner, engines: Sequence[Engine]) -> int:
        await a_moment()
        happened.append("push")
        sent = dict(self._weights())
        for engine in engines:
            assert isinstance(engine, Copied)
            assert engine.weights.keys() == sent.keys()
            for name, weight in sent.items():
                engine.weights[name].copy_(weight)
            engine.policy_version = learner.policy_version
        return learner.policy_version

    async def verify(self, engines: Sequence[Engine]) -> None: ...


def stand_for_vllm(patch: pytest.MonkeyPatch) -> None:
    happened.clear()
    patch.setattr(preflight, "check_vllm", lambda: None)
    patch.setattr(policy_client, "start_vllm", start)
    patch.setattr(vllm, "VllmSync", CopySync)
