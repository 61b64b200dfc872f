"""Start the engine actors of a run in a placement group, and build the sync that feeds them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from skyfleet.cluster.engine_actors import EmbeddedEngineActor, ModelShape, VllmEngineActor
from skyfleet.cluster.engine_sync import (
    DriverSender,
    EngineSync,
    OpenSender,
    VllmEngineSync,
    WeightsLock,
)
from skyfleet.cluster.placement import Placement
from skyfleet.cluster.rank_actors import RankSender, RayRankGroup
from skyfleet.cluster.ray_calls import ActorLostError
from skyfleet.cluster.ray_engine import RayEngine, RayVllmEngine
from skyfleet.cluster.ray_session import find_own_address, open_placement_group
from skyfleet.config.root import RunConfig
from skyfleet.engines.engine import Engine
from skyfleet.engines.engine_pool import EnginePool
from skyfleet.engines.factory import vllm_settings
from skyfleet.engines.vllm_controller import VllmSettings
from skyfleet.errors import ClusterError
from skyfleet.learner.learner import Learner
from skyfleet.learner.policy_model import PolicyModel
from skyfleet.weight_sync.broadcast import sender_options
from skyfleet.weight_sync.sync import PausedSync, WeightSync, build_weight_sync

Sync = EngineSync | VllmEngineSync


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineActors:
    engines: Sequence[RayEngine]
    sync: Sync
    weights: WeightsLock

    def make_sync(self, learner: Learner, engine: Engine) -> WeightSync:
        """Pauses a pool during a push; requests that run are continued with the new weights."""
        self.weights.learner = learner
        return PausedSync(self.sync, engine) if isinstance(engine, EnginePool) else self.sync


async def start_engines(
    config: RunConfig,
    placement: Placement,
    policy_model: PolicyModel,
    model_path: str,
    opened: AsyncExitStack,
    *,
    learner: Learner,
    ranks: RayRankGroup | None,
) -> EngineActors:
    """Engines without the learner's weights, closed with `opened`. vLLM starts from `model_path`."""
    group = await open_placement_group(
        placement.engine_bundles, opened, config.trainer.placement.ready_timeout_seconds
    )
    weights, restored_by = WeightsLock(), list[Sync]()

    async def restore(engine: RayEngine) -> None:
        await restored_by[0].restore(engine)

    sync: Sync
    if config.generator.backend == "vllm":
        # Pushes pause the pool of the run, which is made later; a restored engine has no request.
        whole = build_weight_sync(config, policy_model.loaded.module, _NO_POOL, learner)
        sync = VllmEngineSync(whole, weights)
        arguments: tuple[Any, ...] = (
            config,
            model_path,
            _parallel_settings(config),
            policy_model.loaded.tokenizer,
        )
        create = partial(_create_actor, VllmEngineActor, arguments, group, placement)
        kind: Callable[..., RayEngine] = partial(
            RayVllmEngine, model_dtype=config.generator.model_dtype
        )
    else:
        open_sender: OpenSender = partial(DriverSender, weights)
        host = find_own_address()
        if ranks is not None:
            open_sender = partial(RankSender, ranks)
            host = await asyncio.to_thread(ranks.find_host)
        options = {**_sender_options(config, placement), "address": f"{host}:0"}
        sync = EngineSync(weights, open_sender, options)
        arguments = (config, _describe_shape(policy_model))
        create = partial(_create_actor, EmbeddedEngineActor, arguments, group, placement)
        kind = RayEngine
        opened.push_async_callback(sync.close)
    restored_by.append(sync)
    engines = [
        kind(f"engine {number}", partial(create, number), restore)
        for number in range(placement.n_engines)
    ]
    for engine in engines:
        opened.push_async_callback(engine.close)
    try:
        await asyncio.gather(*(engine.start() for engine in engines))
    except ActorLostError as error:
        raise ClusterError(
            f"generator.num_inference_engines={placement.n_engines}: an engine actor did not start "
            f"({error}); see the logs of Ray in /tmp/ray/session_latest/logs"
        ) from None
    return EngineActors(engines=engines, sync=sync, weights=weights)


def _create_actor(
    kind: type, arguments: Sequence[Any], group: Any, placement: Placement, number: int
) -> Any:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    bundle = placement.engine_bundles[number]
    return (
        ray.remote(kind)
        .options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            max_restarts=0,
            max_concurrency=10_000,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=number
            ),
        )
        .remote(*arguments)
    )


def _describe_shape(policy_model: PolicyModel) -> ModelShape:
    module = policy_model.loaded.module
    return ModelShape(
        module_type=type(module),
        config=module.config,
        tokenizer=policy_model.loaded.tokenizer,
        dtype=next(module.parameters()).dtype,
    )


def _sender_options(config: RunConfig, placement: Placement) -> dict[str, Any]:
    options = sender_options(config.generator, same_gpu=False)
    # The engine is built in the learner's dtype.
    options["dtype"] = None
    if placement.uses_gpus:
        options["device"] = "cuda"
    else:
        options["backend"] = "gloo"
    return options


def _parallel_settings(config: RunConfig) -> VllmSettings:
    """vLLM's arguments for parallel sizes beyond tensor parallel."""
    generator, settings = config.generator, vllm_settings(config, learns=True)
    sizes: dict[str, Any] = {
        "pipeline_parallel_size": generator.inference_engine_pipeline_parallel_size,
        "data_parallel_size": generator.inference_engine_data_parallel_size,
    }
    chosen = {name: size for name, size in sizes.items() if size > 1}
    if generator.inference_engine_expert_parallel_size > 1:
        chosen["enable_expert_parallel"] = True
    return replace(settings, engine_init_kwargs={**chosen, **settings.engine_init_kwargs})


class _NoPool:
    """In the place of an engine that is no pool."""

    policy_version = 0


_NO_POOL: Any = _NoPool()
