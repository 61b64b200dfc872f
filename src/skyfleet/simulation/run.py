"""Simulate a run, and summarize it: seconds per step, idle shares, tokens per second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from skyfleet.simulation.engine import EngineCosts, SimulatedEngine
from skyfleet.simulation.loops import LoopSettings, SimulatedLoop, SimulatedStep, StepCosts
from skyfleet.simulation.rollouts import HostCosts, RolloutWorkers, SimulatedRollouts
from skyfleet.simulation.virtual_time import run_in_virtual_time
from skyfleet.simulation.workload import EpisodePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSystem:
    """All that a simulation needs to know."""

    settings: LoopSettings
    engine: EngineCosts
    n_engines: int
    step: StepCosts
    host: HostCosts
    n_workers: int
    """Processes that play episodes."""
    n_samples: int
    max_concurrent: int
    """Episodes at once, over all engines."""
    draw: Callable[[int, int], EpisodePlan]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    steps: tuple[SimulatedStep, ...]
    """Without those before the run is in its rhythm."""
    n_engines: int
    n_workers: int

    @property
    def step_seconds(self) -> float:
        return (self.steps[-1].end - self.steps[0].start) / len(self.steps)

    def mean(self, name: str) -> float:
        """Of a field of the steps."""
        return fmean(getattr(step, name) for step in self.steps)

    def sum(self, name: str) -> float:
        return float(sum(getattr(step, name) for step in self.steps))

    @property
    def tokens_per_second(self) -> float:
        """Trained, with prompts and replies of environments."""
        return self.mean("n_tokens") / self.step_seconds

    @property
    def engine_idle(self) -> float:
        return 1 - self._busy("engine_busy_seconds") / self.n_engines

    @property
    def worker_idle(self) -> float:
        return 1 - self._busy("worker_busy_seconds") / self.n_workers

    @property
    def learner_idle(self) -> float:
        return 1 - self.mean("learn_seconds") / self.step_seconds

    @property
    def waits_for_environments(self) -> float:
        """Share of an episode's time."""
        seconds = self.sum("episode_seconds")
        return self.sum("environment_seconds") / seconds if seconds else 0.0

    def _busy(self, name: str) -> float:
        """Seconds per second."""
        return self.sum(name) / (self.steps[-1].end - self.steps[0].start)


def simulate(system: SimulatedSystem, *, n_warm_up: int = 1) -> SimulatedRun:
    """The steps after the first `n_warm_up`."""
    steps = simulate_steps(system)
    if system.settings.is_async:
        # The last steps start no new groups.
        steps = steps[: len(steps) - system.settings.max_staleness_steps]
    return SimulatedRun(
        steps=tuple(steps[n_warm_up:]),
        n_engines=system.n_engines,
        n_workers=system.n_workers,
    )


def simulate_steps(system: SimulatedSystem) -> Sequence[SimulatedStep]:
    """All of them."""
    return run_in_virtual_time(_simulate(system))


async def _simulate(system: SimulatedSystem) -> Sequence[SimulatedStep]:
    engines = [SimulatedEngine(system.engine) for _ in range(system.n_engines)]
    rollouts = SimulatedRollouts(
        engines=engines,
        workers=RolloutWorkers(system.n_workers, engines, system.host),
        draw=system.draw,
        n_samples=system.n_samples,
        max_concurrent=system.max_concurrent,
    )
    return await SimulatedLoop(system.settings, rollouts, system.step).run()
