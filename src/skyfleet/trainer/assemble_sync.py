"""How new weights reach the engines, and whose memory is whose meanwhile, from configuration."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial

from skyfleet.config.root import RunConfig
from skyfleet.engines.engine import Engine
from skyfleet.engines.engine_pool import Router
from skyfleet.models.lora import merged_state
from skyfleet.trainer.assemble_policy import PolicyModel
from skyfleet.trainer.policy_client import PolicyClient
from skyfleet.weight_sync.sync import InProcessSync, PausedSync, WeightSync

Resting = Callable[[], AbstractAsyncContextManager[None]]


def build_weight_sync(
    config: RunConfig, policy_model: PolicyModel, policy_client: PolicyClient
) -> WeightSync:
    if config.generator.backend == "embedded":
        return InProcessSync()
    from skyfleet.weight_sync.vllm import VllmSync

    sync = VllmSync(
        lambda: merged_state(policy_model.loaded.module).items(),
        folder=config.generator.weight_sync_dir,
    )
    return (
        PausedSync(sync, policy_client.engine) if isinstance(policy_client.engine, Router) else sync
    )


def build_engine_offload(config: RunConfig, policy_client: PolicyClient) -> Resting:
    """What is around learning: an engine with weights of its own leaves the GPU to the learner."""
    if config.generator.backend == "embedded" or not config.trainer.placement.colocate_all:
        return nullcontext
    return partial(_asleep, policy_client.engine)


@asynccontextmanager
async def _asleep(engine: Engine) -> AsyncIterator[None]:
    await engine.sleep()
    yield
    await engine.wake()
