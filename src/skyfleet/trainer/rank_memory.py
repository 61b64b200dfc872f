"""The memory of one GPU of many: a rank of a sharded learner, an engine, or both on one GPU.

Describes `trainer.strategy=fsdp`: weights of which all are trained are float32 shards, which are the
optimizer's masters too; a layer is gathered in bfloat16 while it runs, and the next one beside it;
embedding, last norm and head stay gathered for the whole pass; gradients are reduced in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

from skyfleet.config.root import RunConfig
from skyfleet.models.shape import ModelShape
from skyfleet.trainer.memory_parts import (
    KV_CACHE,
    SHORTER,
    USE_LORA,
    WEIGHTS,
    MemoryPlan,
    Part,
)
from skyfleet.trainer.update_memory import (
    HEAP_OVERHEAD,
    activations_per_token,
    count_head_bytes,
    tokens_per_forward_pass,
)

GIB = 2**30
_ITEMSIZE = 2
"""bfloat16."""
_IN_FLIGHT = 2
"""Layers that are gathered at once: the one that runs and the next."""
ENGINE_BYTES = 4 * GIB
"""CUDA graphs, activations and the process of a vLLM engine; assumed."""
CUDA_BYTES = int(1.5 * GIB)
"""The CUDA context and NCCL's buffers of a rank; assumed."""
_MORE_GPUS = "more learner GPUs in trainer.placement"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLayout:
    """How the learner's weights and tokens are divided, and what engines have of the GPUs."""

    shards: int = 1
    """Ranks that divide weights, gradients and moments, beside tensor parallelism."""
    tensor: int = 1
    context: int = 1
    """Ranks that divide the tokens of a sequence."""
    engine_tensor: int = 1
    """GPUs of an engine."""
    engine_itemsize: int = 2
    """Bytes per weight of the engine."""
    card_bytes: int = 0
    """Memory of a GPU, of which vLLM takes its share for the KV cache; 0: one sequence fits."""
    is_colocated: bool = True
    """An engine is on the learner's GPU, and sleeps during an update."""


def plan_learner_rank(
    config: RunConfig,
    policy: ModelShape,
    layout: GpuLayout,
    *,
    reference: ModelShape | None = None,
) -> MemoryPlan:
    """A rank of the learner; with a colocated engine also its phases."""
    held = [_context_part(), *_shard_weights(config, policy, layout)]
    optimizer = _shard_optimizer(policy, layout)
    offloads = config.trainer.policy.optimizer_config.offload_after_step
    if not offloads:
        held.append(optimizer)
    if reference is not None:
        n_bytes = _ITEMSIZE * reference.n_parameters // (layout.shards * layout.tensor)
        held.append(Part(name="reference model", n_bytes=n_bytes, remedy=_MORE_GPUS))
    update = (
        _shard_gradients(policy, layout),
        *_gathered(policy, layout),
        *_pass(config, policy, layout),
    )
    phases, names = [update], ["update"]
    if offloads:
        phases.append((_shard_gradients(policy, layout), optimizer))
        names.append("optimizer step")
    phases.append(_transfer(config, policy, layout))
    names.append("weight sync")
    if layout.is_colocated:
        phases.insert(0, _engine(config, policy, layout))
        names.insert(0, "rollouts")
    return MemoryPlan(held=tuple(held), phases=tuple(phases), phase_names=tuple(names))


def plan_engine_gpu(config: RunConfig, policy: ModelShape, layout: GpuLayout) -> MemoryPlan:
    """A GPU that only samples."""
    return MemoryPlan(
        held=(_context_part(),),
        phases=(_engine(config, policy, layout),),
        phase_names=("rollouts",),
    )


def count_shard_bytes(policy: ModelShape, layout: GpuLayout) -> int:
    """Of the tensors that a rank holds of the model between passes, without moments.

    Frozen weights stay in bfloat16, and those that adapters are merged into are kept twice.
    """
    ranks = layout.shards * layout.tensor
    adapters = policy.n_adapter_parameters
    if not adapters:
        return 4 * policy.n_parameters // ranks
    return (_ITEMSIZE * (policy.n_parameters + policy.n_adapted) + 4 * adapters) // ranks


def _context_part() -> Part:
    return Part(name="CUDA and NCCL", n_bytes=CUDA_BYTES, is_estimate=True)


def _shard_weights(config: RunConfig, policy: ModelShape, layout: GpuLayout) -> list[Part]:
    name = "adapters and frozen shards" if policy.n_adapter_parameters else "float32 shards"
    return [
        Part(
            name=name,
            n_bytes=count_shard_bytes(policy, layout),
            remedy=f"{_MORE_GPUS} or {USE_LORA}",
        )
    ]


def _n_trained(policy: ModelShape) -> int:
    return policy.n_adapter_parameters or policy.n_parameters


def _shard_optimizer(policy: ModelShape, layout: GpuLayout) -> Part:
    n_bytes = 8 * _n_trained(policy) // (layout.shards * layout.tensor)
    return Part(name="moments", n_bytes=n_bytes, remedy=f"{_MORE_GPUS} or {USE_LORA}")


def _shard_gradients(policy: ModelShape, layout: GpuLayout) -> Part:
    n_bytes = 4 * _n_trained(policy) // (layout.shards * layout.tensor)
    return Part(name="gradients", n_bytes=n_bytes, remedy=f"{_MORE_GPUS} or {USE_LORA}")


def _gathered(policy: ModelShape, layout: GpuLayout) -> tuple[Part, ...]:
    """Whole weights of the layers in flight and of the root, with their float32 gradients.

    With one shard nothing is gathered, but weights are cast to bfloat16 all the same.
    """
    root = min(2 * policy.vocab_size * policy.hidden_size, policy.n_parameters)
    layer = (policy.n_parameters - root) // policy.n_layers
    per_weight = _ITEMSIZE if policy.n_adapter_parameters else _ITEMSIZE + 4
    return (
        Part(name="gathered layers", n_bytes=_IN_FLIGHT * layer * per_weight // layout.tensor),
        Part(name="gathered embedding and head", n_bytes=root * per_weight // layout.tensor),
    )


def _pass(config: RunConfig, policy: ModelShape, layout: GpuLayout) -> tuple[Part, ...]:
    """A sequence is divided by the context ranks, the inside of a layer also by the tensor ranks."""
    tokens = -(-tokens_per_forward_pass(config) // layout.context)
    recomputes = config.trainer.gradient_checkpointing
    numbers = activations_per_token(policy, recomputes=recomputes)
    inputs = (policy.n_layers + 2) * policy.hidden_size if recomputes else 0
    per_token = inputs + (numbers - inputs) // layout.tensor
    remedy = SHORTER if recomputes else f"trainer.gradient_checkpointing=true or {SHORTER}"
    return (
        Part(
            name="activations",
            n_bytes=int(HEAP_OVERHEAD * tokens * per_token * _ITEMSIZE),
            remedy=remedy,
            is_estimate=True,
        ),
        Part(
            name="logits",
            n_bytes=count_head_bytes(config, policy, on_gpu=True, with_gradient=False),
            remedy="a lower trainer.loss_chunk_size",
            is_estimate=True,
        ),
    )


def _transfer(config: RunConfig, policy: ModelShape, layout: GpuLayout) -> tuple[Part, ...]:
    """`weight_transfer` sends buckets, two in flight; a colocated engine has its weights back by then."""
    bucket = int(config.generator.weight_transfer_threshold_cuda_ipc_GB * 10**9)
    buckets = Part(
        name="transfer buckets",
        n_bytes=2 * bucket,
        remedy="a lower generator.weight_transfer_threshold_cuda_ipc_GB",
    )
    return (buckets, *_engine(config, policy, layout)[:2]) if layout.is_colocated else (buckets,)


def _engine(config: RunConfig, policy: ModelShape, layout: GpuLayout) -> tuple[Part, ...]:
    """vLLM plans its own memory: the share of the GPU that it may have, all of it for its cache."""
    weights = policy.n_parameters * layout.engine_itemsize // layout.engine_tensor
    heads = min(layout.engine_tensor, policy.n_kv_heads)
    one = config.max_episode_tokens * policy.kv_width * _ITEMSIZE // heads
    share = int(config.generator.gpu_memory_utilization * layout.card_bytes)
    cache = max(one, share - weights - ENGINE_BYTES)
    return (
        Part(
            name=f"engine's {WEIGHTS}",
            n_bytes=weights,
            remedy="a higher generator.inference_engine_tensor_parallel_size",
        ),
        Part(name="engine's graphs and activations", n_bytes=ENGINE_BYTES, is_estimate=True),
        Part(
            name=KV_CACHE,
            n_bytes=cache,
            remedy=f"a lower generator.gpu_memory_utilization or {SHORTER}",
        ),
    )
