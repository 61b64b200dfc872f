"""SimulatedRollouts: episodes on engines, rollout workers and environments, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from skyfleet.simulation.engine import SimulatedEngine
from skyfleet.simulation.workload import EpisodePlan

_BLOCK_TOKENS = 16
"""A cached prefix ends at a block of the KV cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCosts:
    """What the Python process of an episode computes, in seconds."""

    turn_seconds: float = 0.0
    episode_seconds: float = 0.0
    token_seconds: float = 0.0
    """Per token of the episode, such as its line in the archive."""
    shares_engine_thread: bool = False
    """The engine runs in the same thread, as the embedded engine does on a CPU."""


class RolloutWorkers:
    """Processes that play episodes; each does one thing at a time."""

    def __init__(self, n_workers: int, engines: Sequence[SimulatedEngine], costs: HostCosts):
        self.costs = costs
        self._engines = engines if costs.shares_engine_thread else ()
        self._busy_until = [0.0] * n_workers
        self.busy_seconds = 0.0

    @property
    def n_workers(self) -> int:
        return len(self._busy_until)

    async def work(self, worker: int, seconds: float) -> None:
        if not seconds:
            return
        self.busy_seconds += seconds
        loop = asyncio.get_running_loop()
        if self._engines:
            until = self._engines[0].block(seconds)
        else:
            until = max(self._busy_until[worker], loop.time()) + seconds
            self._busy_until[worker] = until
        await asyncio.sleep(until - loop.time())


@dataclass(slots=True, kw_only=True)
class SimulatedRollouts:
    engines: Sequence[SimulatedEngine]
    workers: RolloutWorkers
    draw: Callable[[int, int], EpisodePlan]
    """By group and sample."""
    n_samples: int
    max_concurrent: int
    get_version: Callable[[], int] = lambda: 0
    semaphore: asyncio.Semaphore = field(init=False)
    n_episodes: int = 0
    environment_seconds: float = 0.0
    """That episodes waited for their environments."""
    episode_seconds: float = 0.0
    n_running: int = 0
    _prompts: set[tuple[int, int]] = field(default_factory=set)
    """Groups and engines, for the prompts that an engine has cached."""

    def __post_init__(self) -> None:
        self.semaphore = asyncio.Semaphore(self.max_concurrent)

    async def play_group(self, group: int) -> list[EpisodePlan]:
        """All attempts at a task."""
        async with asyncio.TaskGroup() as tasks:
            playing = [
                tasks.create_task(self._play(group, sample)) for sample in range(self.n_samples)
            ]
        for number in range(len(self.engines)):
            self._prompts.discard((group, number))
        return [task.result() for task in playing]

    async def _play(self, group: int, sample: int) -> EpisodePlan:
        episode = self.draw(group, sample)
        async with self.semaphore:
            number = min(range(len(self.engines)), key=lambda at: self.engines[at].n_sessions)
            engine = self.engines[number]
            worker, self.n_episodes = self.n_episodes % self.workers.n_workers, self.n_episodes + 1
            start = asyncio.get_running_loop().time()
            engine.n_sessions += 1
            self.n_running += 1
            await self._wait(episode.reset_seconds)
            context = 0
            for turn, (n_new, n_sampled) in enumerate(episode.turns):
                await self.workers.work(worker, self.workers.costs.turn_seconds)
                engine.open_tokens += n_new + n_sampled
                n_cached = self._share_prompt(group, number, n_new) if not turn else context
                await engine.generate(
                    n_new=n_new if turn else n_new - n_cached,
                    n_cached=n_cached,
                    n_sampled=n_sampled,
                )
                context += n_new + n_sampled
                if turn < len(episode.tool_seconds):
                    await self._wait(episode.tool_seconds[turn])
            await self._wait(episode.grade_seconds)
            costs = self.workers.costs
            await self.workers.work(
                worker, costs.episode_seconds + costs.token_seconds * episode.n_tokens
            )
            engine.n_sessions -= 1
            engine.open_tokens -= context
            self.n_running -= 1
            self.episode_seconds += asyncio.get_running_loop().time() - start
        return episode

    def _share_prompt(self, group: int, engine: int, n_prompt: int) -> int:
        """The prompt's tokens that another attempt of the group left in the engine's cache."""
        if (group, engine) in self._prompts:
            return (n_prompt - 1) // _BLOCK_TOKENS * _BLOCK_TOKENS
        self._prompts.add((group, engine))
        return 0

    async def _wait(self, seconds: float) -> None:
        if seconds:
            self.environment_seconds += seconds
            await asyncio.sleep(seconds)
