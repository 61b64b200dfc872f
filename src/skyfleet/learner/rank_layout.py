"""The ranks of a sharded learner by the configuration: how many of each kind of parallelism."""

from __future__ import annotations

from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError
from skyfleet.learner.process_ranks import RankLayout

_POLICY = "trainer.policy"


def build_layout(config: RunConfig, world_size: int) -> RankLayout:
    """ConfigError if the ranks cannot be divided as configured."""
    policy = config.trainer.policy
    tensor, sequence = policy.tensor_parallel_size, policy.sequence_parallel_size
    if world_size % (tensor * sequence):
        raise ConfigError(
            f"{_POLICY}.tensor_parallel_size={tensor} x {_POLICY}.sequence_parallel_size={sequence} "
            f"does not divide the {world_size} ranks of the learner; start a multiple of "
            f"{tensor * sequence} ranks or lower them"
        )
    data, size = world_size // (tensor * sequence), policy.fsdp_config.fsdp_size
    # As in SkyRL: the ranks over which one copy of the weights is divided.
    shards = world_size // tensor if size < 1 else size
    if shards % sequence or (data * sequence) % shards:
        raise ConfigError(
            f"{_POLICY}.fsdp_config.fsdp_size={size} does not divide the {data * sequence} ranks that "
            f"share the weights, or is no multiple of {_POLICY}.sequence_parallel_size={sequence}; "
            "use -1 or a divisor"
        )
    return RankLayout(
        replicas=data * sequence // shards,
        shards=shards // sequence,
        sequence=sequence,
        tensor=tensor,
    )
