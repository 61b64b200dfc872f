"""Fit a sharded learner on GPUs: each rank holds a part of what one device would hold."""

from __future__ import annotations

from skyfleet.config.root import RunConfig
from skyfleet.trainer.memory_parts import MemoryPlan, Models
from skyfleet.trainer.rank_memory import GpuLayout, plan_learner_rank


def count_ranks(config: RunConfig) -> int:
    """Of the learner: what Ray is asked for, or what torchrun has started."""
    from skyfleet.learner.rank_process import read_place  # it imports torch.distributed

    placement = config.trainer.placement
    if placement.use_ray:
        return placement.policy_num_nodes * placement.policy_num_gpus_per_node
    return read_place().world_size


def plan_ranks(config: RunConfig, models: Models) -> MemoryPlan:
    """A rank's GPU without an engine, which plans with what the learner leaves."""
    from skyfleet.learner.rank_layout import build_layout

    layout = build_layout(config, count_ranks(config))
    # The base weights of an adapted policy are its reference.
    reference = None if models.policy.n_adapter_parameters else models.reference
    return plan_learner_rank(
        config,
        models.policy,
        GpuLayout(
            shards=layout.shards * layout.sequence,
            tensor=layout.tensor,
            context=layout.sequence,
            is_colocated=False,
        ),
        reference=reference,
    )
