"""The synchronous and the asynchronous loop of `trainer`, in virtual time.

The asynchronous loop starts and selects groups by `trainer.open_groups.OpenGroups` itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from skyfleet.simulation.rollouts import SimulatedRollouts
from skyfleet.simulation.workload import EpisodePlan
from skyfleet.tasks.task import Task
from skyfleet.trainer.open_groups import OpenGroup, OpenGroups
from skyfleet.trajectories.trajectory import Group

_SLICES = 50
"""Of an update, each with or without an engine that works beside it."""


class StepCosts(Protocol):
    """What a step takes beside its rollouts, in seconds."""

    @property
    def push_seconds(self) -> float:
        """New weights to all engines, which sample nothing meanwhile."""
        ...

    @property
    def engine_slowdown(self) -> float:
        """Of the engine while the learner works, because both use the machine."""
        ...

    @property
    def learner_slowdown(self) -> float: ...

    @property
    def recomputes_cache(self) -> bool:
        """Running sequences are prefilled again after new weights."""
        ...

    def update_seconds(self, lengths: Sequence[int]) -> float:
        """By the lengths of the samples."""
        ...

    def fixed_seconds(self, n_tokens: int) -> float:
        """Metrics, checks and the log of a step with so many tokens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    batch_size: int
    """Groups per step."""
    n_steps: int
    trained_share: float = 1.0
    """Of the groups, those from which something is learnt."""
    is_async: bool = False
    max_staleness_steps: int = 0
    n_workers: int = 0
    """Groups in flight, with is_async."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    number: int
    start: float
    end: float
    rollout_seconds: float
    """That the learner waited for episodes."""
    learn_seconds: float
    push_seconds: float
    groups: tuple[int, ...]
    staleness: tuple[int, ...]
    """Updates since the first token of each group."""
    n_tokens: int
    n_sampled: int
    engine_busy_seconds: float
    """Over all engines during this step; so are the next three."""
    worker_busy_seconds: float
    environment_seconds: float
    episode_seconds: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


class SimulatedLoop:
    def __init__(
        self, settings: LoopSettings, rollouts: SimulatedRollouts, costs: StepCosts
    ) -> None:
        self.settings, self.rollouts, self.costs = settings, rollouts, costs
        self.version = 0
        self.steps: list[SimulatedStep] = []
        self._loop = asyncio.get_running_loop()
        self._counted: dict[str, float] = {}

    async def run(self) -> list[SimulatedStep]:
        await (self._run_async() if self.settings.is_async else self._run_sync())
        return self.steps

    async def _run_sync(self) -> None:
        size = self.settings.batch_size
        for step in range(1, self.settings.n_steps + 1):
            start, numbers = self._loop.time(), range((step - 1) * size, step * size)
            async with asyncio.TaskGroup() as tasks:
                playing = [tasks.create_task(self.rollouts.play_group(n)) for n in numbers]
            collected = self._loop.time()
            episodes = [task.result() for task in playing]
            await self._finish_step(step, start, collected, list(numbers), episodes, [0] * size)

    async def _run_async(self) -> None:
        settings = self.settings
        groups = OpenGroups(
            [],
            batch_size=settings.batch_size,
            max_staleness_steps=settings.max_staleness_steps,
            total_steps=settings.n_steps,
        )
        player = _GroupPlayer(self, groups)
        try:
            for step in range(1, settings.n_steps + 1):
                player.advance(step)
                start = self._loop.time()
                chosen = await player.take()
                collected = self._loop.time()
                versions = [player.versions[group.number] for group in chosen]
                await self._finish_step(
                    step,
                    start,
                    collected,
                    [group.number for group in chosen],
                    [player.episodes.pop(group.number) for group in chosen],
                    [self.version - version for version in versions],
                )
                if settings.max_staleness_steps:
                    player.advance(step + 1)
        finally:
            player.cancel()

    async def _finish_step(
        self,
        step: int,
        start: float,
        collected: float,
        numbers: Sequence[int],
        episodes: Sequence[Sequence[EpisodePlan]],
        staleness: Sequence[int],
    ) -> None:
        costs, engines = self.costs, self.rollouts.engines
        plans = [one for group in episodes for one in group]
        await self._compute(costs.fixed_seconds(sum(one.n_tokens for one in plans)))
        n_trained = max(1, round(self.settings.trained_share * len(episodes)))
        lengths = [one.n_tokens for group in episodes[:n_trained] for one in group]
        learning = self._loop.time()
        await self._learn(costs.update_seconds(lengths))
        pushed = self._loop.time()
        await self._stop_engines(costs.push_seconds)
        if costs.recomputes_cache:
            for engine in engines:
                engine.recompute_running()
        self.version += 1
        self.steps.append(
            SimulatedStep(
                number=step,
                start=start,
                end=self._loop.time(),
                rollout_seconds=collected - start,
                learn_seconds=pushed - learning,
                push_seconds=self._loop.time() - pushed,
                groups=tuple(numbers),
                staleness=tuple(staleness),
                n_tokens=sum(one.n_tokens for one in plans),
                n_sampled=sum(one.n_sampled for one in plans),
                **self._count_since_last_step(),
            )
        )

    def _count_since_last_step(self) -> dict[str, float]:
        rollouts = self.rollouts
        totals = {
            "engine_busy_seconds": sum(one.count_busy_seconds() for one in rollouts.engines),
            "worker_busy_seconds": rollouts.workers.busy_seconds,
            "environment_seconds": rollouts.environment_seconds,
            "episode_seconds": rollouts.episode_seconds,
        }
        before, self._counted = self._counted, totals
        return {name: total - before.get(name, 0.0) for name, total in totals.items()}

    async def _learn(self, seconds: float) -> None:
        """Engine and learner slow each other down only while both work."""
        costs, engines = self.costs, self.rollouts.engines
        if costs.learner_slowdown == costs.engine_slowdown == 1.0:
            await asyncio.sleep(seconds)
            return
        for engine in engines:
            engine.set_slowdown(costs.engine_slowdown)
        for _ in range(_SLICES):
            beside = any(engine.is_busy for engine in engines)
            await asyncio.sleep(seconds / _SLICES * (costs.learner_slowdown if beside else 1.0))
        for engine in engines:
            engine.set_slowdown(1.0)

    async def _compute(self, seconds: float) -> None:
        """Work of the loop's own process, in which engines of this process do not sample."""
        if self.rollouts.workers.costs.shares_engine_thread:
            await self._stop_engines(seconds)
        elif seconds:
            await asyncio.sleep(seconds)

    async def _stop_engines(self, seconds: float) -> None:
        if seconds:
            until = max(engine.block(seconds) for engine in self.rollouts.engines)
            await asyncio.sleep(until - self._loop.time())


class _GroupPlayer:
    """Starts groups as `trainer.group_rollouts` does, and collects them."""

    def __init__(self, loop: SimulatedLoop, groups: OpenGroups) -> None:
        self._loop, self._groups = loop, groups
        self._sampler = _Sampler(loop.settings.batch_size)
        self._running: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._step = 0
        self.episodes: dict[int, list[EpisodePlan]] = {}
        self.versions: dict[int, int] = {}
        """Of the weights when a group was started."""

    def advance(self, step: int) -> None:
        if step != self._step:
            self._step = step
            self._groups.forget_trained(step - 1)
            self._start_groups()

    async def take(self) -> list[OpenGroup]:
        while (chosen := self._groups.select(self._step)) is None:
            self._changed.clear()
            await self._changed.wait()
        self._groups.assign(self._step, chosen)
        return chosen

    def cancel(self) -> None:
        for task in self._running:
            task.cancel()

    def _start_groups(self) -> None:
        while self._groups.draw(self._sampler, self._step):
            pass
        for group in self._groups.list_startable(self._step):
            if len(self._running) >= self._loop.settings.n_workers:
                break
            group.is_running, group.started_step = True, self._step
            self.versions[group.number] = self._loop.version
            task = asyncio.create_task(self._play(group))
            self._running.add(task)
            task.add_done_callback(self._end_group)

    async def _play(self, group: OpenGroup) -> None:
        self.episodes[group.number] = await self._loop.rollouts.play_group(group.number)
        group.is_running = False
        group.group = Group(task_key=group.task.key, env_key=group.task.env_key, trajectories=())
        self._groups.add_finished(group)

    def _end_group(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            self._start_groups()
            self._changed.set()


class _Sampler:
    """Draws batches of tasks that differ."""

    epoch = 0

    def __init__(self, batch_size: int) -> None:
        self._batch_size, self._numbers = batch_size, count()

    def draw(self) -> list[Task]:
        return [
            Task(key=f"simulated/{next(self._numbers)}", env_key="simulated", prompt="-")
            for _ in range(self._batch_size)
        ]

    def observe(self, task_key: str, *, passed: int, failed: int) -> None:
        """Nothing is learnt here."""

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: object) -> None:
        """It has no state."""
