"""Placement: which GPUs learn and which sample, with SkyRL's keys, and all placements of a number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    learner_gpus: int
    engine_gpus: int
    is_colocated: bool
    """Engines and learner have the same GPUs and take turns."""
    engine_tensor: int = 1
    """GPUs per engine."""
    tensor: int = 1
    """GPUs that divide each layer of the learner."""
    context: int = 1
    """GPUs that divide each sequence of the learner."""
    shards: int = -1
    """GPUs that divide the learner's weights (`fsdp_config.fsdp_size`); -1 is all of them."""

    @property
    def n_gpus(self) -> int:
        return self.learner_gpus if self.is_colocated else self.learner_gpus + self.engine_gpus

    @property
    def n_engines(self) -> int:
        return self.engine_gpus // self.engine_tensor

    @property
    def shard_ranks(self) -> int:
        """Ranks that divide the weights beside tensor parallelism."""
        most = self.learner_gpus // self.tensor
        return most if self.shards < 1 else min(self.shards, most)

    @property
    def replicas(self) -> int:
        return self.learner_gpus // self.tensor // self.shard_ranks

    @property
    def data_ranks(self) -> int:
        """Ranks with samples of their own."""
        return self.learner_gpus // (self.tensor * self.context)

    def describe(self) -> str:
        parts = [f"engines of {self.engine_tensor}"] if self.engine_tensor > 1 else []
        parts += [f"tensor {self.tensor}"] if self.tensor > 1 else []
        parts += [f"context {self.context}"] if self.context > 1 else []
        parts += [f"{self.replicas} x {self.shard_ranks} shards"] if self.replicas > 1 else []
        where = (
            f"{self.learner_gpus} together"
            if self.is_colocated
            else f"{self.learner_gpus} learn, {self.engine_gpus} sample"
        )
        return ", ".join([where, *parts])


def read_placement(config: RunConfig, n_gpus: int, gpus_per_node: int) -> Placement:
    """What the configuration says; ConfigError if it does not fit the GPUs."""
    placement, generator = config.trainer.placement, config.generator
    learner = placement.policy_num_nodes * placement.policy_num_gpus_per_node
    per_engine = _engine_size(config)
    engines = generator.num_inference_engines * per_engine
    found = Placement(
        learner_gpus=learner,
        engine_gpus=engines,
        is_colocated=placement.colocate_all,
        engine_tensor=per_engine,
        tensor=config.trainer.policy.tensor_parallel_size,
        context=config.trainer.policy.sequence_parallel_size,
        shards=config.trainer.policy.fsdp_config.fsdp_size,
    )
    if found.is_colocated and engines != learner:
        raise ConfigError(
            f"generator.num_inference_engines={generator.num_inference_engines} engines of "
            f"{per_engine} GPUs need {engines} of the learner's {learner} "
            f"(trainer.placement.colocate_all=true); set num_inference_engines={learner // per_engine}"
        )
    if found.n_gpus != n_gpus:
        raise ConfigError(
            f"--gpus {n_gpus}: the configuration places {found.describe()}, which is {found.n_gpus}; "
            "change trainer.placement.policy_num_nodes, policy_num_gpus_per_node and "
            "generator.num_inference_engines, or compare all placements with --placements all"
        )
    if problem := find_problem(found, config, gpus_per_node):
        raise ConfigError(problem)
    return found


def list_placements(config: RunConfig, n_gpus: int, gpus_per_node: int) -> list[Placement]:
    """Together, and apart with every split into whole nodes or, on one node, whole engines."""
    base = Placement(
        learner_gpus=n_gpus,
        engine_gpus=n_gpus,
        is_colocated=True,
        engine_tensor=_engine_size(config),
        tensor=config.trainer.policy.tensor_parallel_size,
        context=config.trainer.policy.sequence_parallel_size,
        shards=config.trainer.policy.fsdp_config.fsdp_size,
    )
    candidates = [] if config.trainer.fully_async.enabled else [base]
    candidates += [
        replace(base, learner_gpus=learner, engine_gpus=n_gpus - learner, is_colocated=False)
        for learner in _split_sizes(n_gpus, gpus_per_node)
    ]
    problems = {one: find_problem(one, config, gpus_per_node) for one in candidates}
    fitting = [one for one, problem in problems.items() if not problem]
    if not fitting:
        first = next(iter(problems.values()), "asynchronous training needs at least two GPUs")
        raise ConfigError(f"--gpus {n_gpus}: no placement fits: {first}")
    return fitting


def _split_sizes(n_gpus: int, gpus_per_node: int) -> Iterator[int]:
    """Learners' GPUs: single ones on one node, else nodes, at most eight different ones."""
    unit = 1 if n_gpus <= gpus_per_node else gpus_per_node
    stride = unit * max(1, n_gpus // unit // 8)
    yield from range(stride, n_gpus, stride)


def find_problem(placement: Placement, config: RunConfig, gpus_per_node: int) -> str:
    """One sentence if the sizes do not divide; empty if they do."""
    learner, group = placement.learner_gpus, placement.tensor * placement.context
    trainer, n_samples = config.trainer, config.generator.n_samples_per_prompt
    if learner % group:
        return (
            f"{learner} learner GPUs are not divisible by tensor x sequence parallel size "
            f"{placement.tensor} x {placement.context}; change trainer.policy.sequence_parallel_size"
        )
    if placement.engine_gpus % placement.engine_tensor or not placement.engine_gpus:
        return (
            f"{placement.engine_gpus} engine GPUs are not divisible into engines of "
            f"{placement.engine_tensor}; change generator.inference_engine_tensor_parallel_size"
        )
    if (learner // placement.tensor) % placement.shard_ranks:
        return (
            f"{learner} learner GPUs are not divisible by trainer.policy.fsdp_config.fsdp_size="
            f"{placement.shards}; use a divisor, or -1"
        )
    if placement.n_gpus > gpus_per_node and placement.n_gpus % gpus_per_node:
        return (
            f"{placement.n_gpus} GPUs are not whole nodes of {gpus_per_node}; use a multiple of "
            f"{gpus_per_node}"
        )
    if trainer.policy_mini_batch_size * n_samples < placement.data_ranks:
        return (
            f"trainer.policy_mini_batch_size={trainer.policy_mini_batch_size} x {n_samples} samples are "
            f"fewer than the {placement.data_ranks} ranks that divide them; raise it"
        )
    return ""


def _engine_size(config: RunConfig) -> int:
    generator = config.generator
    return (
        generator.inference_engine_tensor_parallel_size
        * generator.inference_engine_pipeline_parallel_size
    )
