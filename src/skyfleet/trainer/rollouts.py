"""Collect the rollouts of one training step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from skyfleet.algorithms.filters import FilterResult
from skyfleet.envs.env import EnvFactory
from skyfleet.rollouts.conversation import AgentFactory
from skyfleet.rollouts.episode import Limits, collect
from skyfleet.tasks.sampling import Sampler
from skyfleet.tracking.tracing import RolloutTracer
from skyfleet.trajectories.trajectory import Group, Trajectory

BATCH_STRIDE = 100_000
"""Offset between the sampling seeds of one step's batches; larger than the steps of any run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCollector:
    sampler: Sampler
    open_env: EnvFactory
    agent: Callable[[int], AgentFactory]
    """The policy as an agent, by seed: the same seed samples the same tokens."""
    limits: Limits
    n_samples: int
    max_concurrent: int
    """Episodes at once."""
    filter_groups: Callable[[Sequence[Group]], FilterResult]
    tracer: RolloutTracer | None = None

    async def collect(
        self, step: int, on_finished: Callable[[Trajectory], None]
    ) -> tuple[list[Group], FilterResult]:
        """Roll out one batch, or as many as dynamic sampling needs."""
        groups: list[Group] = []
        tracer = self.tracer and self.tracer.bind(set="train", step=step)
        for batch in count():
            groups += await collect(
                self.sampler.draw(),
                self.open_env,
                # A task sampled again in the same step needs different tokens.
                self.agent(step + batch * BATCH_STRIDE),
                self.limits,
                n_samples=self.n_samples,
                max_concurrent=self.max_concurrent,
                on_finished=on_finished,
                tracer=tracer,
            )
            kept = self.filter_groups(groups)
            if not kept.wants_more:
                return groups, kept
        raise AssertionError  # count() does not end
