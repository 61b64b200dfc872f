"""A speaker that vLLM can serve, and a learner that hands it weights."""

from __future__ import annotations

from copy import deepcopy
from functools import cache

import torch
from tests.fakes.tiny_policy import CAPACITY, DIMENSIONS, TinyPolicy

from skyfleet.chat.renderers import make_renderer
from skyfleet.engines.engine import Engine
from skyfleet.models.decoder import Decoder
from skyfleet.models.tiny import build_tiny, train_tokenizer
from skyfleet.weight_sync.vllm import VllmSync


@cache
def wide_policy() -> TinyPolicy:
    """vLLM's attention wants heads of 32."""
    tokenizer = train_tokenizer([], vocab_size=300)
    dimensions = {**DIMENSIONS, "head_dim": 32, "initializer_range": 0.1}
    decoder = Decoder(build_tiny(tokenizer, dimensions, seed=0), max_positions=CAPACITY)
    return TinyPolicy(tokenizer=tokenizer, decoder=decoder, renderer=make_renderer(tokenizer))


def moved(amount: float, *, only: str = "") -> Decoder:
    """The speaker's weights, each whose name ends so a little elsewhere."""
    module = deepcopy(wide_policy().decoder.module)
    randomness = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name.endswith(only):
                weight.add_(torch.randn(weight.shape, generator=randomness), alpha=amount)
    return Decoder(module, max_positions=CAPACITY)


class LearnerOf:
    """As much of a learner as a sync asks for."""

    def __init__(self, decoder: Decoder, policy_version: int) -> None:
        self.decoder, self.policy_version = decoder, policy_version

    def sync(self, *, folder: str | None = None) -> VllmSync:
        return VllmSync(lambda: self.decoder.module.state_dict().items(), folder=folder)

    async def push(self, *engines: Engine, folder: str | None = None) -> int:
        return await self.sync(folder=folder).push(self, engines)  # type: ignore[arg-type]
