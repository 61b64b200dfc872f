"""Plan a run: measure a probe of it, and extrapolate to the whole run with intervals."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from math import sqrt
from statistics import fmean
from time import perf_counter

from skyfleet.analysis.run_costs import RunCosts, measure_run
from skyfleet.analysis.run_plan import (
    DetectableGain,
    Estimate,
    ExpectedSignal,
    MemoryPhase,
    RunPlan,
    finite_or_none,
)
from skyfleet.config.keys import flatten
from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError, require_torch
from skyfleet.evaluation.report import EvalReport
from skyfleet.metrics.intervals import repeated_mean, wilson
from skyfleet.metrics.significance import detectable_difference
from skyfleet.trainer.preflight import check_references, check_trainable
from skyfleet.trainer.probe import Probe, count_checkpoints, count_evaluations, open_probe
from skyfleet.trainer.usage import read_peak_memory

_WARM_UP_STEPS = 1
"""Steps that are not measured: their caches are empty."""


_BUSY_LOAD = 1.5
"""Load average per core above which measured times are not those of a quiet machine."""
logger = logging.getLogger(__name__)


async def plan_run(
    config: RunConfig,
    *,
    n_steps: int,
    eval_episodes: int = 0,
    on_progress: Callable[[str], None] = lambda _: None,
) -> RunPlan:
    """The plan of a run on this machine, from `n_steps` steps of it."""
    start = perf_counter()
    require_torch()
    check_trainable(config)
    if not config.data.train_data:  # before a model is looked for on the hub
        raise ConfigError("data.train_data is empty; name the configuration of a run, such as tiny")
    check_references(config)
    memory = _plan_memory(config)
    _warn_if_busy()
    async with open_probe(
        config, n_steps=n_steps, eval_episodes=eval_episodes, start=start, on_progress=on_progress
    ) as probe:
        costs = measure_run(probe.folder)
        if not costs.steps:
            raise ConfigError(
                f"the run has {probe.schedule.total_steps} steps, and a plan needs at least one; "
                "lower trainer.train_batch_size, or add tasks"
            )
        return RunPlan(
            skyfleet_version=version("skyfleet"),
            run_name=config.trainer.run_name,
            machine=describe_machine(),
            config=flatten(config),
            n_probe_steps=len(costs.steps),
            n_steps=probe.schedule.total_steps,
            n_warm_start_steps=probe.schedule.warm_start_steps,
            n_episodes=config.trainer.train_batch_size * config.generator.n_samples_per_prompt,
            n_evaluations=count_evaluations(probe.schedule) if probe.eval_tasks else 0,
            n_checkpoints=count_checkpoints(probe.schedule),
            quantities=_estimate_quantities(probe, costs, memory),
            memory=memory,
            signals=_estimate_signals(costs),
            detectable=_estimate_detectable(config, probe),
        )


def _warn_if_busy() -> None:
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > _BUSY_LOAD * cores:
        logger.warning(
            "the load average is %.1f on %d cores: other processes make the measured times too long",
            load,
            cores,
        )


def describe_machine() -> str:
    """The GPU, or the number of CPU cores."""
    import torch

    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{usable} CPU cores, {platform.machine()}, torch with {torch.get_num_threads()} threads"


def _estimate_quantities(
    probe: Probe, costs: RunCosts, memory: Sequence[MemoryPhase]
) -> dict[str, Estimate]:
    measured = measure_run(probe.folder, from_step=1 + _WARM_UP_STEPS)
    steady = measured if measured.steps else costs
    step = _estimate(steady.step_seconds)
    if not any(steady.learn_seconds):
        logger.warning(
            "no measured step had a learning signal, so the plan has no time for learning; measure more "
            "with --steps"
        )
    rollout, learn = _estimate(steady.rollout_seconds), _estimate(steady.learn_seconds)
    sampled, response = _estimate(steady.sampled_tokens), _estimate(steady.response_tokens)
    found = {
        "startup": _once(probe.startup_seconds),
        "step": step,
        "rollouts per step": rollout,
        "learning per step": learn,
        **_estimate_evaluations(probe, costs),
        "checkpoint": _once(probe.last_checkpoint_seconds),
        "sampled tokens per step": sampled,
        "response tokens per step": response,
        "sampling rate": _estimate_rate(steady.sampled_tokens, steady.rollout_seconds),
        "training rate": _estimate_rate(steady.response_tokens, steady.learn_seconds),
        "peak memory": _estimate_peak(memory),
    }
    first_checkpoint = max(costs.checkpoint_seconds, default=found["checkpoint"].value)
    return found | {"whole run": _add_up(probe, found, first_checkpoint)}


def _estimate_evaluations(probe: Probe, costs: RunCosts) -> dict[str, Estimate]:
    """Time grows with the number of tasks; the first evaluation includes the baselines."""
    probed = sum(probe.probed_tasks.values())
    if not probed or not costs.evaluation_seconds:
        return {}
    scale = sum(probe.eval_tasks.values()) / probed
    first, last = (costs.evaluation_seconds[at(costs.evaluation_seconds)] for at in (min, max))
    return {
        "first evaluation": _once(first * scale),
        "later evaluation": _once(last * scale),
    }


def _add_up(probe: Probe, found: Mapping[str, Estimate], first_checkpoint: float) -> Estimate:
    """The parts are measured independently, so the squares of their uncertainties add."""
    schedule = probe.schedule
    n_later = max(0, count_evaluations(schedule) - 1)
    nothing = _once(0.0)
    parts = [
        found["startup"],
        found["step"].scaled(schedule.total_steps),
        found.get("first evaluation", nothing),
        found.get("later evaluation", nothing).scaled(n_later),
        _once(first_checkpoint),
        found["checkpoint"].scaled(count_checkpoints(schedule) - 1),
    ]
    value = sum(part.value for part in parts)
    below = sqrt(sum((part.value - part.low) ** 2 for part in parts))
    above = sqrt(sum((part.high - part.value) ** 2 for part in parts))
    return Estimate(value=value, low=value - below, high=value + above)


def _estimate_peak(memory: Sequence[MemoryPhase]) -> Estimate:
    """The probe's own peak; longer episodes may raise it to what is planned."""
    peak = float(read_peak_memory())
    return Estimate(value=peak, low=peak, high=max(peak, *(p.n_bytes for p in memory), 0.0))


def _estimate_rate(tokens: Sequence[float], seconds: Sequence[float]) -> Estimate:
    rates = [n / time for n, time in zip(tokens, seconds, strict=True) if time > 0]
    return _estimate(rates)


def _estimate(values: Sequence[float]) -> Estimate:
    if not values:
        return _once(0.0)
    low, high = repeated_mean(values)
    return Estimate(value=fmean(values), low=low, high=high)


def _once(value: float) -> Estimate:
    return Estimate(value=value, low=value, high=value)


def _plan_memory(config: RunConfig) -> list[MemoryPhase]:
    """By phase; empty if the model's shape is unknown."""
    from skyfleet.trainer.fit_memory import fit_training

    fitted = fit_training(config)
    if fitted.plan is None or fitted.available is None:
        return []
    held = {part.name: part.n_bytes for part in fitted.plan.held if part.n_bytes}
    before = fitted.available.held_bytes
    if before:
        held = {"loaded before": before, **held}
    return [
        MemoryPhase(name=name, n_bytes=sum(parts.values()), parts=parts)
        for name, phase in zip(fitted.plan.phase_names, fitted.plan.phases, strict=True)
        for parts in [{**held, **{part.name: part.n_bytes for part in phase if part.n_bytes}}]
    ]


def _estimate_signals(costs: RunCosts) -> dict[str, ExpectedSignal]:
    found = {}
    for env_key, signal in costs.signals.items():
        share = signal.n_mixed / signal.n_groups if signal.n_groups else 0.0
        low, high = wilson(share, signal.n_groups)
        found[env_key] = ExpectedSignal(
            n_groups=signal.n_groups,
            mixed_groups=Estimate(value=share, low=low, high=high),
            pass_rate=signal.pass_rate,
        )
    return found


def _estimate_detectable(config: RunConfig, probe: Probe) -> dict[str, DetectableGain]:
    reports, attempts = probe.folder.reports(), config.generator.eval_n_samples_per_prompt
    found = {}
    for name, n_tasks in probe.eval_tasks.items():
        by_step = reports.get(name, {})
        if len(by_step) < 2:
            continue
        noise, unrelated = _measure_discordance(by_step[min(by_step)], by_step[max(by_step)])
        low, high = (
            detectable_difference(n_tasks, discordance, attempts=attempts)
            for discordance in (noise, max(noise, unrelated))
        )
        found[name] = DetectableGain(
            n_tasks=n_tasks, attempts=attempts, low=finite_or_none(low), high=finite_or_none(high)
        )
    return found


def _measure_discordance(before: EvalReport, after: EvalReport) -> tuple[float, float]:
    """The mean squared difference of a task's rates: as measured between two evaluations of nearly
    the same policy, and as it would be if before and after were unrelated."""
    pairs = [
        (one.success_rate, after.outcomes[key].success_rate)
        for key, one in before.outcomes.items()
        if one.rewards and key in after.outcomes and after.outcomes[key].rewards
    ]
    if not pairs:
        return 0.0, 0.0
    noise = fmean((b - a) ** 2 for b, a in pairs)
    rates = [rate for pair in pairs for rate in pair]
    centre = fmean(rates)
    return noise, 2 * fmean((rate - centre) ** 2 for rate in rates)
