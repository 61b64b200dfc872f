"""GpuPlan: what a run takes on many GPUs of a stored card, by simulation, for one or all placements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError
from skyfleet.models.known_shapes import read_known_shape
from skyfleet.models.shape import ModelShape, read_model_shape
from skyfleet.simulation.card_costs import GIB, CardEngineCosts, CardStepCosts
from skyfleet.simulation.card_profile import CardProfile, check_model
from skyfleet.simulation.machine_plan import build_limits, build_loop_settings
from skyfleet.simulation.placement import Placement
from skyfleet.simulation.rollouts import HostCosts
from skyfleet.simulation.run import SimulatedRun, SimulatedSystem, simulate
from skyfleet.simulation.workload import EpisodePlan, Workload, draw_episode
from skyfleet.trainer.memory_parts import MemoryPlan
from skyfleet.trainer.rank_memory import GpuLayout, plan_engine_gpu, plan_learner_rank
from skyfleet.trainer.update_memory import tokens_per_forward_pass

N_STEPS, N_SEEDS = 4, 3
_FP8 = "fp8"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlan:
    placement: Placement
    runs: tuple[SimulatedRun, ...]
    """One per seed."""
    memory: Mapping[str, MemoryPlan]
    """By role: learner, and engine unless it is colocated."""
    card_bytes: int
    push_seconds: float
    savings: Mapping[str, float]
    """What the step would save if a cost were halved, as a share of it: what saturates first is largest.
    Empty if it was not looked for."""

    @property
    def step_seconds(self) -> float:
        return sum(run.step_seconds for run in self.runs) / len(self.runs)

    @property
    def range_seconds(self) -> tuple[float, float]:
        seconds = [run.step_seconds for run in self.runs]
        return min(seconds), max(seconds)

    @property
    def tokens_per_second(self) -> float:
        return sum(run.tokens_per_second for run in self.runs) / len(self.runs)

    @property
    def peak_bytes(self) -> int:
        return max(plan.peak_bytes for plan in self.memory.values())

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.card_bytes

    @property
    def bottleneck(self) -> str:
        return max(self.savings, key=lambda name: self.savings[name])


def read_shape(config: RunConfig) -> ModelShape:
    model = config.trainer.policy.model
    shape = read_known_shape(model.path, lora=model.lora) or read_model_shape(
        model.path,
        config.trainer.policy.model_config_kwargs,
        lora=model.lora,
        may_download=False,
    )
    if shape is None:
        raise ConfigError(
            f"trainer.policy.model.path={model.path!r}: its config.json cannot be read here; download "
            "it, or use a folder that has it"
        )
    return shape


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlanner:
    config: RunConfig
    profile: CardProfile
    workload: Workload
    workers_per_node: int = 1
    """Processes that play episodes."""
    n_steps: int = N_STEPS
    n_seeds: int = N_SEEDS

    def __post_init__(self) -> None:
        check_model(self.profile, self.config.trainer.policy.model.path)
        if self.config.generator.backend != self.profile.backend:
            raise ConfigError(
                f"generator.backend={self.config.generator.backend!r}: the profile of "
                f"{self.profile.name} has the decoding of {self.profile.backend} only; set "
                f"generator.backend={self.profile.backend}"
            )

    def plan(self, placement: Placement, *, finds_bottleneck: bool = True) -> GpuPlan:
        """Without its bottleneck in half the time."""
        shape = read_shape(self.config)
        systems = [self._build(placement, shape, seed) for seed in range(self.n_seeds)]
        runs = tuple(self._simulate(system) for system in systems)
        whole = runs[0].step_seconds
        savings = (
            {
                name: 1 - self._simulate(halve(systems[0])).step_seconds / whole
                for name, halve in HALVES.items()
            }
            if finds_bottleneck
            else {}
        )
        return GpuPlan(
            placement=placement,
            runs=runs,
            memory=plan_memory(self.config, shape, placement, self.profile),
            card_bytes=int(self.profile.numbers.memory_gib.value * GIB),
            push_seconds=systems[0].step.push_seconds,
            savings=savings,
        )

    def _simulate(self, system: SimulatedSystem) -> SimulatedRun:
        rules = self.config.trainer.fully_async
        warm_up = 1 + (rules.max_staleness_steps if rules.enabled else 0)
        return simulate(system, n_warm_up=warm_up)

    def _build(self, placement: Placement, shape: ModelShape, seed: int) -> SimulatedSystem:
        config, generator, trainer = self.config, self.config.generator, self.config.trainer
        rules, limits = trainer.fully_async, build_limits(config)
        most = generator.max_num_seqs * placement.n_engines
        warm_up = 1 + (rules.max_staleness_steps if rules.enabled else 0)
        n_nodes = max(1, placement.n_gpus // self.profile.gpus_per_node)
        numbers = self.profile.numbers

        def draw(group: int, sample: int) -> EpisodePlan:
            return draw_episode(self.workload, limits, seed=seed, group=group, sample=sample)

        return SimulatedSystem(
            settings=build_loop_settings(
                config, self.workload, n_steps=warm_up + self.n_steps, max_concurrent=most
            ),
            engine=CardEngineCosts(
                profile=self.profile,
                shape=shape,
                placement=placement,
                weight_bytes=count_engine_itemsize(config),
                memory_share=generator.gpu_memory_utilization,
                max_running=generator.max_num_seqs,
            ),
            n_engines=placement.n_engines,
            step=self._build_step_costs(placement, shape),
            host=HostCosts(turn_seconds=numbers.turn_seconds.value),
            n_workers=n_nodes * self.workers_per_node,
            n_samples=generator.n_samples_per_prompt,
            max_concurrent=most,
            draw=draw,
        )

    def _build_step_costs(self, placement: Placement, shape: ModelShape) -> CardStepCosts:
        trainer = self.config.trainer
        algorithm = trainer.algorithm
        recomputes_old = trainer.fully_async.enabled or bool(
            algorithm.off_policy_correction.tis_ratio_type
        )
        has_reference = algorithm.use_kl_loss or algorithm.use_kl_in_reward
        epochs = trainer.update_epochs_per_batch
        return CardStepCosts(
            profile=self.profile,
            shape=shape,
            placement=placement,
            micro_tokens=tokens_per_forward_pass(self.config),
            n_mini_batches=epochs * -(-trainer.train_batch_size // trainer.policy_mini_batch_size),
            n_extra_forwards=int(recomputes_old) + int(has_reference),
            recomputes=trainer.gradient_checkpointing,
            offloads=trainer.policy.optimizer_config.offload_after_step,
        )


def count_engine_itemsize(config: RunConfig) -> int:
    """Bytes per weight of vLLM's copy."""
    return 1 if config.generator.engine_init_kwargs.get("quantization") == _FP8 else 2


def plan_memory(
    config: RunConfig, shape: ModelShape, placement: Placement, profile: CardProfile
) -> dict[str, MemoryPlan]:
    layout = GpuLayout(
        shards=placement.shard_ranks,
        tensor=placement.tensor,
        context=placement.context,
        engine_tensor=placement.engine_tensor,
        engine_itemsize=count_engine_itemsize(config),
        card_bytes=int(profile.numbers.memory_gib.value * GIB),
        is_colocated=placement.is_colocated,
    )
    algorithm = config.trainer.algorithm
    has_reference = algorithm.use_kl_loss or algorithm.use_kl_in_reward
    # The base weights of an adapted policy are its reference.
    reference = shape if has_reference and not shape.n_adapter_parameters else None
    plans = {"learner": plan_learner_rank(config, shape, layout, reference=reference)}
    if not placement.is_colocated:
        plans["engine"] = plan_engine_gpu(config, shape, layout)
    return plans


def choose_best(plans: Sequence[GpuPlan]) -> GpuPlan:
    """The fastest of those that fit into the memory."""
    fitting = [plan for plan in plans if plan.fits]
    if not fitting:
        least = min(plans, key=lambda plan: plan.peak_bytes)
        raise ConfigError(
            f"no placement fits into {plans[0].card_bytes / GIB:.0f} GiB: {least.placement.describe()} "
            f"takes {least.peak_bytes / GIB:.0f} GiB per GPU; use more GPUs, "
            "trainer.policy.model.lora.rank=16, a lower generator.max_input_length or "
            "generator.gpu_memory_utilization"
        )
    return min(fitting, key=lambda plan: plan.step_seconds)


@dataclass(frozen=True, slots=True)
class _Scaled:
    """Costs of which some are multiplied by a factor."""

    costs: CardEngineCosts | CardStepCosts
    factors: Mapping[str, float]

    def __getattr__(self, name: str) -> object:
        value = getattr(self.costs, name)
        factor = self.factors.get(name)
        if factor is None:
            return value
        if callable(value):
            return lambda *given: factor * value(*given)
        return factor * value


def _halve_engine(system: SimulatedSystem, *names: str) -> SimulatedSystem:
    return replace(system, engine=_Scaled(system.engine, dict.fromkeys(names, 0.5)))  # type: ignore[arg-type]


def _halve_step(system: SimulatedSystem, *names: str) -> SimulatedSystem:
    return replace(system, step=_Scaled(system.step, dict.fromkeys(names, 0.5)))  # type: ignore[arg-type]


def _halve_host(system: SimulatedSystem) -> SimulatedSystem:
    return replace(system, host=replace(system.host, turn_seconds=system.host.turn_seconds / 2))


def _halve_environments(system: SimulatedSystem) -> SimulatedSystem:
    draw = system.draw

    def draw_faster(group: int, sample: int) -> EpisodePlan:
        episode = draw(group, sample)
        return replace(
            episode,
            tool_seconds=tuple(seconds / 2 for seconds in episode.tool_seconds),
            reset_seconds=episode.reset_seconds / 2,
            grade_seconds=episode.grade_seconds / 2,
        )

    return replace(system, draw=draw_faster)


HALVES: Mapping[str, Callable[[SimulatedSystem], SimulatedSystem]] = {
    "decoding": lambda system: _halve_engine(system, "step_seconds", "context_seconds"),
    "prefill": lambda system: _halve_engine(system, "prefill_seconds"),
    "the update": lambda system: _halve_step(system, "update_seconds"),
    "weight transfer": lambda system: _halve_step(system, "push_seconds"),
    "environments": _halve_environments,
    "rollout workers": _halve_host,
    "the loop's own work": lambda system: _halve_step(system, "fixed_seconds"),
}
"""By what it would speed up."""
