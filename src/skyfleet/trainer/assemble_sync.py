"""How new weights reach the engines, and whose memory is whose meanwhile, from configuration."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial

from skyfleet.config.root import RunConfig
from skyfleet.engines.engine import Engine
from skyfleet.engines.engine_pool import Router
from skyfleet.models.lora import merged_state
from skyfleet.trainer.assemble_policy import Speaker
from skyfleet.trainer.voice import Voice
from skyfleet.weight_sync.sync import InProcessSync, PausedSync, WeightSync

Resting = Callable[[], AbstractAsyncContextManager[None]]


def sync_of(config: RunConfig, speaker: Speaker, voice: Voice) -> WeightSync:
    if config.generator.backend == "embedded":
        return InProcessSync()
    from skyfleet.weight_sync.vllm import VllmSync

    sync = VllmSync(
        lambda: merged_state(speaker.loaded.module).items(),
        folder=config.generator.weight_sync_dir,
    )
    return PausedSync(sync, voice.engine) if isinstance(voice.engine, Router) else sync


def resting_of(config: RunConfig, voice: Voice) -> Resting:
    """What is around learning: an engine with weights of its own leaves the GPU to the learner."""
    if config.generator.backend == "embedded" or not config.trainer.placement.colocate_all:
        return nullcontext
    return partial(_asleep, voice.engine)


@asynccontextmanager
async def _asleep(engine: Engine) -> AsyncIterator[None]:
    await engine.sleep()
    yield
    await engine.wake()
