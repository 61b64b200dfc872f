"""Placement: which processes a run needs on which GPUs and CPUs, from SkyRL's keys; needs no Ray."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from skyfleet.config.root import RunConfig
from skyfleet.errors import ClusterError, ConfigError

Resources = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The actors of a run. Each takes one bundle of a placement group, whole on one node."""

    n_ranks: int
    """Processes of the learner; 0: it is in the driver."""
    ranks_per_node: int
    n_engines: int
    """Engine actors; 0: the engine shares the weights of a learner in the driver."""
    gpus_per_engine: int
    """Tensor, pipeline and data parallel together."""
    is_colocated: bool
    """Engines are on the GPUs of the learner."""
    workers_per_node: int
    uses_gpus: bool

    @property
    def engine_bundles(self) -> list[dict[str, float]]:
        """One per engine; an engine over several GPUs has them on one node."""
        if self.uses_gpus:
            gpus = 0.0 if self.is_colocated else float(self.gpus_per_engine)
            return [{"CPU": 1.0, "GPU": gpus} for _ in range(self.n_engines)]
        return [{"CPU": float(self.gpus_per_engine)} for _ in range(self.n_engines)]

    @property
    def rank_bundles(self) -> list[dict[str, float]]:
        """One per node of the learner."""
        n, nodes = self.ranks_per_node, -(-self.n_ranks // max(self.ranks_per_node, 1))
        bundle = {"CPU": float(n), "GPU": float(n)} if self.uses_gpus else {"CPU": float(n)}
        return [bundle for _ in range(nodes)]

    @property
    def n_processes(self) -> int:
        return self.n_ranks + self.n_engines + self.workers_per_node

    def describe(self) -> str:
        device = "GPU" if self.uses_gpus else "CPU"
        learner = f"{self.n_ranks} learner ranks" if self.n_ranks else "the learner in the driver"
        engines = (
            f"{self.n_engines} engines of {self.gpus_per_engine} {device}s"
            if self.n_engines
            else "the engine with the learner"
        )
        return f"{learner}, {engines}, {self.workers_per_node} rollout workers per node"


def plan_placement(config: RunConfig, *, uses_gpus: bool) -> Placement:
    """ConfigError lists everything that cannot be placed, whatever the cluster has."""
    if problems := list(find_placement_problems(config, uses_gpus=uses_gpus)):
        raise ConfigError("\n".join(problems))
    place, generator = config.trainer.placement, config.generator
    n_ranks = place.policy_num_nodes * place.policy_num_gpus_per_node
    has_engines = not (_shares_weights(config) or generator.is_remote)
    return Placement(
        n_ranks=n_ranks if config.trainer.strategy == "fsdp" else 0,
        ranks_per_node=place.policy_num_gpus_per_node,
        n_engines=generator.num_inference_engines if has_engines else 0,
        gpus_per_engine=_count_gpus_per_engine(config),
        is_colocated=place.colocate_all,
        workers_per_node=generator.num_rollout_workers_per_node,
        uses_gpus=uses_gpus,
    )


def _shares_weights(config: RunConfig) -> bool:
    """Whether the engine samples with the tensors of a learner in the driver."""
    generator = config.generator
    return (
        generator.backend == "embedded"
        and config.trainer.placement.colocate_all
        and generator.num_inference_engines == 1
        and not config.trainer.fully_async.enabled
        and config.trainer.strategy == "single"
    )


def find_placement_problems(config: RunConfig, *, uses_gpus: bool) -> Iterator[str]:
    place, generator = config.trainer.placement, config.generator
    n_ranks = place.policy_num_nodes * place.policy_num_gpus_per_node
    if n_ranks > 1 and config.trainer.strategy != "fsdp":
        yield (
            f"trainer.placement.policy_num_nodes={place.policy_num_nodes} x "
            f"policy_num_gpus_per_node={place.policy_num_gpus_per_node} are {n_ranks} learner ranks "
            f"with trainer.strategy={config.trainer.strategy}; set trainer.strategy=fsdp, or both to 1"
        )
    per_engine = _count_gpus_per_engine(config)
    if per_engine > 1 and generator.backend == "embedded":
        yield (
            f"generator.backend=embedded runs an engine on one device, and its parallel sizes ask for "
            f"{per_engine}; set generator.backend=vllm, or the sizes to 1 and "
            f"generator.num_inference_engines={generator.num_inference_engines * per_engine}"
        )
    yield from _find_expert_problems(config)
    if place.colocate_all and uses_gpus and not (generator.is_remote or _shares_weights(config)):
        # An actor without a GPU of its own sees all of them, and would take the first.
        yield (
            "trainer.placement.colocate_all=true puts engines on the learner's GPUs, and actors with "
            "parts of a GPU are not supported; set trainer.placement.colocate_all=false"
        )


def _find_expert_problems(config: RunConfig) -> Iterator[str]:
    generator = config.generator
    tensor = generator.inference_engine_tensor_parallel_size
    data, expert = (
        generator.inference_engine_data_parallel_size,
        generator.inference_engine_expert_parallel_size,
    )
    if expert > 1 and expert != data * tensor:
        yield (
            f"generator.inference_engine_expert_parallel_size={expert} is not data x tensor parallel "
            f"size = {data} x {tensor}; set it to {data * tensor}, or to 1"
        )


def _count_gpus_per_engine(config: RunConfig) -> int:
    generator = config.generator
    return (
        generator.inference_engine_tensor_parallel_size
        * generator.inference_engine_pipeline_parallel_size
        * generator.inference_engine_data_parallel_size
    )


def check_fits(placement: Placement, nodes: Sequence[Resources]) -> None:
    """ClusterError if the bundles do not fit the nodes' resources, largest bundles first."""
    left = [dict(node) for node in nodes]
    for node in left:
        node["CPU"] = node.get("CPU", 0.0) - placement.workers_per_node
    short = [node for node in left if node["CPU"] < 0]
    if short:
        raise ClusterError(
            f"generator.num_rollout_workers_per_node={placement.workers_per_node} take one CPU each, "
            f"and a node has {short[0]['CPU'] + placement.workers_per_node:g}; lower it"
        )
    bundles = [*placement.rank_bundles, *placement.engine_bundles]
    for bundle in sorted(bundles, key=lambda bundle: -max(bundle.values())):
        for node in left:
            if all(node.get(name, 0.0) >= amount for name, amount in bundle.items()):
                for name, amount in bundle.items():
                    node[name] = node.get(name, 0.0) - amount
                break
        else:
            raise ClusterError(_describe_misfit(placement, bundle, nodes))


def _describe_misfit(placement: Placement, bundle: Resources, nodes: Sequence[Resources]) -> str:
    bundles = [*placement.rank_bundles, *placement.engine_bundles]
    has, needs = (
        ", ".join(f"{sum(row.get(k, 0.0) for row in rows):g} {k}s" for k in bundle)
        for rows in (nodes, bundles)
    )
    piece = " and ".join(f"{amount:g} {name}s" for name, amount in bundle.items() if amount)
    return (
        f"the placement ({placement.describe()}) needs {needs}, of which {piece} on one node, and the "
        f"cluster of {len(nodes)} nodes has {has}; lower trainer.placement.policy_num_gpus_per_node, "
        "generator.num_inference_engines or its parallel sizes, or add nodes"
    )
