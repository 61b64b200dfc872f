"""Play: one episode on a rollout worker, as the driver sees it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from skyfleet.cluster.messages import StartEpisode
from skyfleet.engines.engine import Engine
from skyfleet.errors import EnvError
from skyfleet.tasks.task import Task
from skyfleet.tracking.tracing import EpisodeSpans
from skyfleet.trajectories.episode_clock import EpisodeClock
from skyfleet.trajectories.trajectory import Ending, Failure, Trajectory

SUSPECT_DEATHS, MAX_DEATHS_ALONE = 2, 2
"""An episode whose worker died so often is played alone, and fails if that kills workers too."""


@dataclass(slots=True, eq=False)
class Play:
    """An episode that a worker plays, or will."""

    number: int
    task: Task
    start: StartEpisode
    engine: Engine | None
    """None for an agent that needs none."""
    future: asyncio.Future[Trajectory]
    spans: EpisodeSpans | None
    started_ns: int = 0
    requests: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    completions: Counter[str] = field(default_factory=Counter)
    """By session, since the episode was started on its worker."""
    n_deaths: int = 0
    n_deaths_alone: int = 0

    @property
    def is_suspect(self) -> bool:
        return self.n_deaths >= SUSPECT_DEATHS


class ForwardingClock(EpisodeClock):
    """Not entered: the episode's own clock, in the worker, counts and expires."""

    __slots__ = ("_report",)

    def __init__(self, limit_seconds: float, report: Callable[[float, str], None]) -> None:
        super().__init__(limit_seconds)
        self._report = report

    def add_engine_downtime(self, seconds: float, problem: str = "") -> None:
        super().add_engine_downtime(seconds, problem)
        self._report(seconds, problem)


async def release(play: Play, session: str) -> None:
    if play.engine is not None:
        await play.engine.release(session)


async def forget(play: Play) -> None:
    """The engine forgets what it sampled for an episode that is played again."""
    tasks, play.requests = list(play.requests.values()), {}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    forget = getattr(play.engine, "forget", None)
    for session, n_completions in play.completions.items():
        if forget is not None:
            forget(session, n_completions)
        with suppress(Exception):  # a failing engine has no cache of it either
            await release(play, session)
    play.completions = Counter()


def fail_episode(play: Play) -> Trajectory:
    error = EnvError(
        f"its rollout worker died {play.n_deaths} times while it was played, {play.n_deaths_alone} "
        f"times while nothing else was: task {play.task.key} kills the process that plays it; set "
        "environment.isolation=process, or leave the task out"
    )
    return Trajectory(
        task_key=play.task.key,
        env_key=play.task.env_key,
        sample=play.start.sample,
        prompt=(),
        turns=(),
        transcripts=(),
        ending=Ending.FAILED,
        grade=None,
        failure=Failure.of(error),
    )
