"""Collect the rollouts of one training step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from skyfleet.algorithms.filters import FilterResult
from skyfleet.envs.env import EnvFactory
from skyfleet.rollouts.conversation import AgentFactory
from skyfleet.rollouts.episode import EpisodeRunner, Limits, collect
from skyfleet.tasks.sampling import Sampler
from skyfleet.tracking.tracing import RolloutTracer
from skyfleet.trainer.journal import StepJournal
from skyfleet.trajectories.records import encode_episode
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
    run: EpisodeRunner | None = None

    async def collect(
        self, step: int, on_finished: Callable[[Trajectory, bytes], None], journal: StepJournal
    ) -> tuple[list[Group], FilterResult]:
        """Roll out one batch, or as many as dynamic sampling needs.

        `on_finished` gets each episode and its line for the archive. Episodes in the journal are not
        rolled out; all are durable in it on return.
        """
        groups: list[Group] = []
        tracer = self.tracer and self.tracer.bind(set="train", step=step)
        for batch in count():
            tasks = self.sampler.draw()
            restored = journal.restore(batch, tasks, self.n_samples)
            for record in restored.values():
                on_finished(record.episode, record.line)

            def finish(
                episode: Trajectory,
                batch: int = batch,
                keys: Sequence[str] = tuple(task.key for task in tasks),
            ) -> None:
                line = encode_episode(episode)
                journal.add(batch, keys.index(episode.task_key), episode, line)
                on_finished(episode, line)

            groups += await collect(
                tasks,
                self.open_env,
                # A task sampled again in the same step needs different tokens.
                self.agent(step + batch * BATCH_STRIDE),
                self.limits,
                n_samples=self.n_samples,
                max_concurrent=self.max_concurrent,
                on_finished=finish,
                recorded={place: record.episode for place, record in restored.items()},
                tracer=tracer,
                run=self.run,
            )
            await journal.sync()
            kept = self.filter_groups(groups)
            if not kept.wants_more:
                return groups, kept
        raise AssertionError  # count() does not end
