"""One episode: the agent loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import perf_counter

from skyfleet.envs.env import Env, EnvFactory, Opening
from skyfleet.envs.lifecycle import opened
from skyfleet.errors import ContextFullError, EnvError, EpisodeError, VerifierError, blamed_on
from skyfleet.rollouts.conversation import Conversation, Policy
from skyfleet.rollouts.limits import Limits
from skyfleet.tasks.grade import Grade
from skyfleet.tasks.task import Task
from skyfleet.trajectories.trajectory import Ending, Failure, Trajectory, Turn


class OvertimeError(TimeoutError):
    """The episode's own time is over; a timeout of anyone else's is not this one."""


class _Episode:
    """What has happened so far, so that a failure at any point loses nothing before it."""

    def __init__(self) -> None:
        self.opening = Opening(messages=())
        self.turns: list[Turn] = []
        self.conversation: Conversation | None = None
        self.ending = Ending.FAILED
        self.grade: Grade | None = None
        self.failure: Failure | None = None


async def run_episode(
    task: Task, open_env: EnvFactory, policy: Policy, limits: Limits, *, sample: int = 0
) -> Trajectory:
    """Play one episode and grade what it left, finished or cut short.

    An `EpisodeError` ends it and is recorded on it; anything else, cancellation included, passes
    through after the env is closed and the engine's session released.
    """
    start = perf_counter()
    episode = _Episode()
    try:
        async with _env_in_time(open_env, task, limits) as env:
            try:
                await _play_in_time(episode, task, env, policy, limits, sample, start)
            except EpisodeError as error:
                episode.ending, episode.failure = Ending.FAILED, Failure.of(error)
            else:
                await _grade(episode, env, limits)
    except EpisodeError as error:
        episode.ending, episode.failure = Ending.FAILED, Failure.of(error)
    finally:
        if episode.conversation is not None:
            await episode.conversation.close()
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


@asynccontextmanager
async def _env_in_time(open_env: EnvFactory, task: Task, limits: Limits) -> AsyncIterator[Env]:
    async def in_time(task: Task) -> Env:
        async with _in_time(limits):
            return await open_env(task)

    async with opened(in_time, task) as env:
        yield env


async def _play_in_time(
    episode: _Episode,
    task: Task,
    env: Env,
    policy: Policy,
    limits: Limits,
    sample: int,
    start: float,
) -> None:
    try:
        async with _in_time(limits, used_seconds=perf_counter() - start):
            with blamed_on(EnvError, "reset"):
                episode.opening = await env.reset()
            episode.conversation = policy(task, episode.opening, f"{task.key}/{sample}")
            episode.ending = await _play(env, episode.conversation, limits, episode.turns)
    except OvertimeError as error:
        if episode.conversation is None:
            # Nobody has played yet: there is nothing to grade, and a zero would be a lie.
            raise EnvError(f"reset: {error}") from None
        episode.ending, episode.failure = Ending.TIMEOUT, Failure.of(error)


@asynccontextmanager
async def _in_time(limits: Limits, *, used_seconds: float = 0.0) -> AsyncIterator[None]:
    allowed = limits.seconds_or_none
    left = None if allowed is None else max(0.0, allowed - used_seconds)
    try:
        async with asyncio.timeout(left) as deadline:
            yield
    except TimeoutError:
        if not deadline.expired():
            raise
        raise OvertimeError(
            f"not finished after {allowed:g} s (generator.trajectory_timeout_seconds)"
        ) from None


async def _play(env: Env, conversation: Conversation, limits: Limits, turns: list[Turn]) -> Ending:
    while len(turns) < limits.max_turns:
        if conversation.prompt_length > limits.max_input_length:
            return Ending.CONTEXT_FULL
        start = perf_counter()
        try:
            action = await conversation.speak()
        except ContextFullError:
            return Ending.CONTEXT_FULL
        spoken = perf_counter()
        if conversation.finish == "length":
            turns.append(Turn(action=action, replies=(), reward=0.0, engine_seconds=spoken - start))
            return Ending.LENGTH
        with blamed_on(EnvError, "step"):
            step = await env.step(action)
        turns.append(
            Turn(
                action=action,
                replies=step.messages,
                reward=step.reward,
                engine_seconds=spoken - start,
                env_seconds=perf_counter() - spoken,
            )
        )
        if step.done:
            return Ending.DONE
        conversation.hear(step.messages)
    return Ending.MAX_TURNS


async def _grade(episode: _Episode, env: Env, limits: Limits) -> None:
    """A grade that cannot be had stays unknown, with its cause; it is never zero."""
    try:
        with blamed_on(VerifierError, "grade"):
            async with _in_time(limits):
                episode.grade = await env.grade()
    except VerifierError as error:
        episode.failure = Failure.of(error)
