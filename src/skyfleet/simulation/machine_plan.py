"""The system that a configuration describes on a measured machine, ready to simulate."""

from __future__ import annotations

from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError
from skyfleet.simulation.loops import LoopSettings
from skyfleet.simulation.machine_profile import (
    MachineEngineCosts,
    MachineProfile,
    MachineStepCosts,
    host_costs,
)
from skyfleet.simulation.run import SimulatedRun, SimulatedSystem, simulate
from skyfleet.simulation.workload import EpisodeLimits, Workload, draw_episode

N_STEPS, N_SEEDS = 6, 5


def build_machine_system(
    config: RunConfig,
    profile: MachineProfile,
    workload: Workload,
    *,
    n_steps: int,
    seed: int = 0,
) -> SimulatedSystem:
    """One device, as it was measured; ConfigError if something else was measured."""
    trainer, generator = config.trainer, config.generator
    if profile.model != trainer.policy.model.path:
        raise ConfigError(
            f"--profile is of {profile.model}, and trainer.policy.model.path="
            f"{trainer.policy.model.path!r}; measure it with `skyfleet plan CONFIG --measure`"
        )
    if profile.is_async != trainer.fully_async.enabled:
        raise ConfigError(
            f"--profile was measured with trainer.fully_async.enabled={str(profile.is_async).lower()}; "
            "measure this configuration with `skyfleet plan CONFIG --measure`"
        )
    limits = build_limits(config)
    return SimulatedSystem(
        settings=build_loop_settings(config, workload, n_steps=n_steps),
        engine=MachineEngineCosts(profile=profile, max_running=generator.max_num_seqs),
        n_engines=1,
        step=MachineStepCosts(
            profile=profile, recomputes_cache=trainer.fully_async.clear_kv_cache_on_weight_sync
        ),
        host=host_costs(profile),
        n_workers=1,
        n_samples=generator.n_samples_per_prompt,
        max_concurrent=generator.max_num_seqs,
        draw=lambda group, sample: draw_episode(
            workload, limits, seed=seed, group=group, sample=sample
        ),
    )


def build_limits(config: RunConfig) -> EpisodeLimits:
    generator = config.generator
    return EpisodeLimits(
        max_turns=generator.max_turns,
        max_input_length=generator.max_input_length,
        max_generate_length=generator.sampling_params.max_generate_length,
    )


def build_loop_settings(
    config: RunConfig, workload: Workload, *, n_steps: int, max_concurrent: int = 0
) -> LoopSettings:
    """`max_concurrent` episodes at once; by default those of one engine."""
    trainer, generator = config.trainer, config.generator
    rules = trainer.fully_async
    n_workers = rules.count_workers(trainer.train_batch_size)
    if rules.max_staleness_steps:
        # As `trainer.assemble` does: a group without a place would only become stale.
        most = max_concurrent or generator.max_num_seqs
        n_workers = min(n_workers, max(1, -(-most // generator.n_samples_per_prompt)))
    return LoopSettings(
        batch_size=trainer.train_batch_size,
        n_steps=n_steps + (rules.max_staleness_steps if rules.enabled else 0),
        trained_share=workload.trained_share,
        is_async=rules.enabled,
        max_staleness_steps=rules.max_staleness_steps if rules.enabled else 0,
        n_workers=n_workers,
    )


def simulate_machine(
    config: RunConfig, profile: MachineProfile, workload: Workload
) -> list[SimulatedRun]:
    """One run per seed."""
    rules = config.trainer.fully_async
    warm_up = 1 + (rules.max_staleness_steps if rules.enabled else 0)
    return [
        simulate(
            build_machine_system(config, profile, workload, n_steps=warm_up + N_STEPS, seed=seed),
            n_warm_up=warm_up,
        )
        for seed in range(N_SEEDS)
    ]
