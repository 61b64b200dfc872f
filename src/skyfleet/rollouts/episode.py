"""Run episodes: the agent loop for one, and many at once with bounded concurrency."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType

from skyfleet.envs.env import Env, EnvFactory, Observation, opened
from skyfleet.envs.validation import validate_grade, validate_observation, validate_step
from skyfleet.errors import ContextFullError, EnvError, EpisodeError, VerifierError, wrap_errors
from skyfleet.rollouts.conversation import AgentFactory, Conversation
from skyfleet.tasks.task import Grade, Task
from skyfleet.trajectories.trajectory import Ending, Failure, Group, Trajectory, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    max_turns: int
    max_input_length: int
    """Tokens; a turn whose prompt is longer is not begun."""
    trajectory_timeout_seconds: float
    """From opening to the last turn, and again for the grade; 0 switches it off."""

    @property
    def seconds_or_none(self) -> float | None:
        return self.trajectory_timeout_seconds or None


class EpisodeTimeoutError(TimeoutError):
    """The episode's own time is over; a timeout of anyone else's is not this one."""


class _InTime:
    """OvertimeError when the time of `limits` is over."""

    # Entered twice in every episode, and a generator makes a small one 3 % slower.
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._timeout = asyncio.timeout(limits.seconds_or_none)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError:
            seconds = self._limits.trajectory_timeout_seconds
            raise EpisodeTimeoutError(
                f"not finished after {seconds:g} s (generator.trajectory_timeout_seconds)"
            ) from None


class _Episode:
    """What has happened so far, so that a failure at any point loses nothing before it."""

    def __init__(self) -> None:
        self.opening = Observation(messages=())
        self.turns: list[Turn] = []
        self.conversation: Conversation | None = None
        self.ending = Ending.FAILED
        self.grade: Grade | None = None
        self.failure: Failure | None = None

    async def release(self) -> None:
        if self.conversation is not None:
            await self.conversation.close()


async def run_episode(
    task: Task, open_env: EnvFactory, policy: AgentFactory, limits: Limits, *, sample: int = 0
) -> Trajectory:
    """Play one episode and grade what it left, finished or cut short.

    An `EpisodeError` ends it and is recorded on it; one that keeps the grade leaves the ending as
    it was and the grade unknown, never zero. Anything else, cancellation included, passes through
    after the env is closed and the engine's session released.
    """
    start = perf_counter()
    episode = _Episode()
    async with AsyncExitStack() as closing:
        # The last to happen: an engine that hangs keeps no env open.
        closing.push_async_callback(episode.release)
        try:
            env = await _play_in_time(episode, closing, task, open_env, policy, limits, sample)
            await _grade(episode, env, limits)
        except EpisodeError as error:
            episode.failure = Failure.of(error)
    return Trajectory(
        task_key=task.key,
        env_key=task.env_key,
        sample=sample,
        opening=episode.opening.messages,
        turns=tuple(episode.turns),
        transcripts=episode.conversation.transcripts if episode.conversation else (),
        ending=episode.ending,
        grade=episode.grade,
        failure=episode.failure,
        seconds=perf_counter() - start,
    )


async def _play_in_time(
    episode: _Episode,
    closing: AsyncExitStack,
    task: Task,
    open_env: EnvFactory,
    policy: AgentFactory,
    limits: Limits,
    sample: int,
) -> Env:
    """The env that was played in, still open."""
    env = None
    try:
        async with _InTime(limits):
            env = await opened(open_env, task, closing)
            with wrap_errors(EnvError, "reset"):
                episode.opening = validate_observation(await env.reset())
            episode.conversation = policy(task, episode.opening, f"{task.key}/{sample}")
            episode.ending = await _play(env, episode.conversation, limits, episode.turns)
    except EpisodeTimeoutError as error:
        if env is None or episode.conversation is None:
            # Nobody has played yet: there is nothing to grade, and a zero would be a lie.
            doing = "reset" if env else f"opening {task.env_key}"
            raise EnvError(f"{doing}: {error}") from None
        episode.ending, episode.failure = Ending.TIMEOUT, Failure.of(error)
    return env


async def _play(env: Env, conversation: Conversation, limits: Limits, turns: list[Turn]) -> Ending:
    while len(turns) < limits.max_turns:
        if conversation.prompt_length > limits.max_input_length:
            return Ending.CONTEXT_FULL
        start = perf_counter()
        try:
            action = await conversation.generate()
        except ContextFullError:
            return Ending.CONTEXT_FULL
        spoken = perf_counter()
        if conversation.finish == "length":
            turns.append(Turn(action=action, replies=(), reward=0.0, engine_seconds=spoken - start))
            return Ending.LENGTH
        with wrap_errors(EnvError, "step"):
            step = validate_step(await env.step(action))
        turns.append(
            Turn(
                action=action,
                replies=step.opening.messages if step.opening else step.messages,
                reward=step.reward,
                engine_seconds=spoken - start,
                env_seconds=perf_counter() - spoken,
            )
        )
        if step.done:
            return Ending.DONE
        if step.keep_recent_turns is not None:
            conversation.truncate_history(keep_recent_turns=step.keep_recent_turns)
        if step.opening is None:
            conversation.observe(step.messages)
        else:
            conversation.restart(step.opening)
    return Ending.MAX_TURNS


async def _grade(episode: _Episode, env: Env, limits: Limits) -> None:
    with wrap_errors(VerifierError, "grade"):
        async with _InTime(limits):
            episode.grade = validate_grade(await env.grade())


async def collect(
    tasks: Sequence[Task],
    open_env: EnvFactory,
    policy: AgentFactory,
    limits: Limits,
    *,
    n_samples: int,
    max_concurrent: int,
    on_finished: Callable[[Trajectory], None] = lambda _: None,
) -> list[Group]:
    """`n_samples` attempts at each task, in the order asked. A failed attempt is one of them."""
    gate = asyncio.Semaphore(max_concurrent)

    async def gated(task: Task, sample: int) -> Trajectory:
        async with gate:
            trajectory = await run_episode(task, open_env, policy, limits, sample=sample)
        on_finished(trajectory)
        return trajectory

    async with asyncio.TaskGroup() as episodes:
        running = [
            [episodes.create_task(gated(task, sample)) for sample in range(n_samples)]
            for task in tasks
        ]
    return [
        Group(
            task_key=task.key,
            env_key=task.env_key,
            trajectories=tuple(attempt.result() for attempt in attempts),
        )
        for task, attempts in zip(tasks, running, strict=True)
    ]
