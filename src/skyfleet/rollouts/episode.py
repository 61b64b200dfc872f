"""Run episodes: the agent loop for one, and many at once with bounded concurrency."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Protocol

from skyfleet.chat.message import Message
from skyfleet.envs.env import Env, EnvFactory, Observation, Step, open_env_until
from skyfleet.envs.guard import EnvGuard, Isolation
from skyfleet.envs.isolation import isolate
from skyfleet.envs.message_validation import count_characters, cut_messages
from skyfleet.envs.validation import validate_observation, validate_step
from skyfleet.errors import (
    AbandonedCallError,
    ContextFullError,
    EngineError,
    EnvError,
    EpisodeError,
)
from skyfleet.rollouts.conversation import AgentFactory, Conversation
from skyfleet.rollouts.grading import EpisodeGrade, check_step_rewards, grade_episode
from skyfleet.rollouts.rendering import render
from skyfleet.storage.working_directory import find_working_directory, warn_if_changed
from skyfleet.streams import restore_streams
from skyfleet.tasks.task import Grade, Task
from skyfleet.tracking.tracing import EpisodeSpans, RolloutTracer
from skyfleet.trajectories.episode_clock import EpisodeClock, EpisodeTimeoutError
from skyfleet.trajectories.trajectory import Ending, Failure, Group, Trajectory, Turn

OnMessages = Callable[[Sequence[Message]], None]
"""Observes an episode: called with the prompt, then with each action and each reply as they come."""

_NO_SPAN = nullcontext()

RECORDED_CHARACTERS = 10_000
"""What is recorded of an observation that is too long for any agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    max_turns: int
    max_input_length: int
    """Tokens; a turn with a longer prompt is not started."""
    trajectory_timeout_seconds: float
    """From reset to the last turn, and again for the grade; 0 disables it."""
    close_timeout_seconds: float = 30
    """For closing the environment, and for a cancelled call to end before it is abandoned."""
    max_observation_chars: int = 10_000_000
    """An observation with more characters ends the episode as context_full; 0 disables it."""
    isolation: Isolation = field(default_factory=Isolation)
    """Where a user's environment runs."""

    def allows(self, n_characters: int) -> bool:
        """Whether an observation of this length is short enough for an agent."""
        return n_characters <= self.max_observation_chars or not self.max_observation_chars


class _Episode:
    """The state of an episode, kept outside the loop so that a failure loses nothing before it."""

    def __init__(self, on_messages: OnMessages, spans: EpisodeSpans | None = None) -> None:
        self.on_messages, self.spans = on_messages, spans
        self.prompt: tuple[Message, ...] = ()
        self.turns: list[Turn] = []
        self.steps: list[Step] = []
        self.conversation: Conversation | None = None
        self.ending = Ending.FAILED
        self.grade: Grade | None = None
        self.failure: Failure | None = None
        self.has_started = False

    def span(self, name: str, phase: str) -> AbstractContextManager[None]:
        """Measure a part of the episode, if the run is traced."""
        return _NO_SPAN if self.spans is None else self.spans.measure(name, phase)

    def add_grade(self, graded: EpisodeGrade) -> None:
        if graded.info and self.turns:
            last = self.turns[-1]
            self.turns[-1] = replace(last, info={**last.info, **graded.info})
        self.grade = graded.grade

    async def release(self) -> None:
        if self.conversation is not None:
            await self.conversation.close()


async def run_episode(
    task: Task,
    open_env: EnvFactory,
    policy: AgentFactory,
    limits: Limits,
    *,
    sample: int = 0,
    on_messages: OnMessages = lambda _: None,
    spans: EpisodeSpans | None = None,
) -> Trajectory:
    """Run one episode and grade it, whether it finished or was cut short.

    An `EpisodeError` ends the episode and is recorded on it. If only grading fails, the ending
    stays and the grade is unknown, never zero. Any other exception, including cancellation,
    propagates after the environment is closed and the engine's session released. `on_messages`
    receives all messages in order. `spans` gets the times of its parts.
    """
    start, directory = perf_counter(), find_working_directory()
    episode = _Episode(on_messages, spans)
    guard = EnvGuard(
        task.env_key,
        task.key,
        limit_seconds=limits.trajectory_timeout_seconds,
        cancel_grace_seconds=limits.close_timeout_seconds,
        isolation=limits.isolation,
    )
    guard.calls_key = (task.env_key, id(open_env))
    run_task = asyncio.current_task()
    assert run_task is not None
    n_cancels = run_task.cancelling()
    guard.count_requests = lambda: run_task.cancelling() - n_cancels
    # A task of its own: only the run cancels this one, so what else cancels the episode is known
    # to be its environment.
    playing = asyncio.create_task(_play(episode, task, open_env, policy, limits, sample, guard))
    try:
        await playing
        if run_task.cancelling() > n_cancels:
            raise asyncio.CancelledError
    except asyncio.CancelledError:
        if run_task.cancelling() > n_cancels or not episode.has_started:
            raise
        # Its environment cancels every wait, also those after a failure.
        if episode.failure is None and episode.grade is None:
            reason = f"{guard.during}: it cancelled the task that runs its episode"
            episode.failure = Failure.of(EnvError(reason))
    finally:
        restore_streams()
        warn_if_changed(directory, task.env_key)
        # In this task, and last: an engine that hangs does not keep the environment open.
        await episode.release()
    return Trajectory(
        task_key=task.key,
        env_key=task.env_key,
        sample=sample,
        prompt=episode.prompt,
        turns=tuple(episode.turns),
        transcripts=episode.conversation.transcripts if episode.conversation else (),
        ending=episode.ending,
        grade=episode.grade,
        failure=episode.failure,
        seconds=perf_counter() - start,
    )


async def _play(
    episode: _Episode,
    task: Task,
    open_env: EnvFactory,
    policy: AgentFactory,
    limits: Limits,
    sample: int,
    guard: EnvGuard,
) -> None:
    episode.has_started = True
    with guard:
        async with AsyncExitStack() as closing:
            try:
                env = await _run_in_time(
                    episode, closing, task, open_env, policy, limits, sample, guard
                )
                with episode.span("verifier", "grade"):
                    graded = await grade_episode(
                        env,
                        episode.steps,
                        episode.ending,
                        guard=guard,
                        timeout_seconds=limits.trajectory_timeout_seconds,
                    )
                episode.add_grade(graded)
                if graded.is_by_env:
                    check_step_rewards(episode.steps, graded.grade, task, open_env)
            except EpisodeError as error:
                episode.failure = Failure.of(error)


async def _run_in_time(
    episode: _Episode,
    closing: AsyncExitStack,
    task: Task,
    open_env: EnvFactory,
    policy: AgentFactory,
    limits: Limits,
    sample: int,
    guard: EnvGuard,
) -> Env:
    """Return the environment after the last turn, still open."""
    env, is_reset = None, False
    clock = EpisodeClock(limits.trajectory_timeout_seconds)
    try:
        async with clock:
            with episode.span("environment", "open"):
                env = await open_env_until(
                    closing,
                    isolate(open_env),
                    task,
                    guard=guard,
                    close_timeout_seconds=limits.close_timeout_seconds,
                )
            with episode.span("environment", "reset"):
                observation = await guard.call(
                    EnvError, "reset", _reset, env, convert=validate_observation
                )
            is_reset = True
            try:
                episode.ending = await _converse(
                    episode, env, task, observation, policy, limits, sample, guard
                )
            except asyncio.CancelledError:
                await guard.settle()
                if guard.is_cancelled_from_outside:
                    raise
                raise EngineError("the engine cancelled a request that it had accepted") from None
    except EpisodeTimeoutError as error:
        if guard.abandoned:
            reason = f"{guard.during}: {error}; it ignored its cancellation"
            raise AbandonedCallError(reason) from None
        if env is None or not is_reset:
            # The agent has not acted, so there is nothing to grade; zero would be wrong.
            stage = "reset" if env else f"opening {task.env_key}"
            raise EnvError(f"{stage}: {error}") from None
        if clock.would_have_finished:
            # Without the failed requests the agent might have finished, so zero would be wrong.
            problem = f" ({clock.engine_problem})" if clock.engine_problem else ""
            raise EngineError(
                f"{error}, of which {clock.engine_downtime_seconds:.1f} s were lost to failed, retried "
                f"or unanswered requests to the engine{problem}; check the server, or raise the "
                "limit if it is only slow"
            ) from None
        episode.ending, episode.failure = Ending.TIMEOUT, Failure.of(error)
    return env


def _reset(env: Env) -> Awaitable[object]:
    return env.reset()  # looked up inside the guard: an attribute may raise too


def _step(env: Env, action: Message) -> Awaitable[object]:
    return env.step(action)


async def _converse(
    episode: _Episode,
    env: Env,
    task: Task,
    observation: Observation,
    policy: AgentFactory,
    limits: Limits,
    sample: int,
    guard: EnvGuard,
) -> Ending:
    n_characters = count_characters(observation.messages, observation.tools)
    if not limits.allows(n_characters):
        episode.prompt = cut_messages(observation.messages, RECORDED_CHARACTERS)
        episode.on_messages(episode.prompt)
        return Ending.CONTEXT_FULL
    episode.prompt = observation.messages
    episode.on_messages(observation.messages)
    start = partial(policy, task, observation, f"{task.key}/{sample}")
    conversation = await render(start, n_characters)
    episode.conversation = conversation
    return await _run_turns(episode, env, conversation, limits, guard)


async def _run_turns(
    episode: _Episode, env: Env, conversation: Conversation, limits: Limits, guard: EnvGuard
) -> Ending:
    turns, is_cut = episode.turns, False
    while len(turns) < limits.max_turns:
        if conversation.prompt_length > limits.max_input_length:
            return Ending.CONTEXT_FULL
        start = perf_counter()
        try:
            with episode.span("engine", "generate"):
                action = await conversation.generate()
        except ContextFullError as error:
            if error.is_by_server and not turns:
                # The agent has not acted: zero would score the server's configuration.
                raise EngineError(
                    "the server calls the first prompt too long; raise its context length, or lower "
                    f"max_generate_length: {error}"
                ) from error
            return Ending.CONTEXT_FULL
        generated = perf_counter()
        episode.on_messages((action,))
        # The environment also receives a message that the token limit cut: it may hold the answer.
        with episode.span("environment", "step"):
            step: Step = await guard.call(
                EnvError, "step", _step, env, action, convert=validate_step
            )
        replies = step.opening.messages if step.opening else step.messages
        n_characters = count_characters(replies, step.opening.tools if step.opening else ())
        if is_too_long := not limits.allows(n_characters):
            replies = cut_messages(replies, RECORDED_CHARACTERS)
        is_cut = conversation.finish == "length"
        episode.steps.append(step)
        turns.append(
            Turn(
                action=action,
                replies=replies,
                reward=step.reward,
                engine_seconds=generated - start,
                env_seconds=perf_counter() - generated,
                info=step.info,
                finish_reason=conversation.finish,
            )
        )
        episode.on_messages(replies)
        if step.done:
            return Ending.LENGTH if is_cut else Ending.DONE
        if is_too_long:
            return Ending.CONTEXT_FULL
        await render(partial(_continue, conversation, step), n_characters)
    return Ending.LENGTH if is_cut else Ending.MAX_TURNS


def _continue(conversation: Conversation, step: Step) -> None:
    """Give the agent what the environment answered."""
    if step.keep_recent_turns is not None:
        conversation.truncate_history(keep_recent_turns=step.keep_recent_turns)
    if step.opening is None:
        conversation.observe(step.messages)
    else:
        conversation.restart(step.opening)


class EpisodeRunner(Protocol):
    """Runs one episode as `run_episode` does, maybe in another process."""

    def __call__(
        self,
        task: Task,
        open_env: EnvFactory,
        policy: AgentFactory,
        limits: Limits,
        *,
        sample: int = 0,
        spans: EpisodeSpans | None = None,
    ) -> Awaitable[Trajectory]: ...


async def collect(
    tasks: Sequence[Task],
    open_env: EnvFactory,
    policy: AgentFactory,
    limits: Limits,
    *,
    n_samples: int,
    max_concurrent: int,
    on_finished: Callable[[Trajectory], None] = lambda _: None,
    recorded: Mapping[tuple[str, int], Trajectory] | None = None,
    tracer: RolloutTracer | None = None,
    semaphore: asyncio.Semaphore | None = None,
    run: EpisodeRunner | None = None,
) -> list[Group]:
    """Run `n_samples` attempts per task, in task order. A failed attempt counts as an attempt.

    Attempts in `recorded`, by task key and sample, are taken from there instead. A `semaphore` of
    `max_concurrent` bounds the episodes of several calls together. `run` runs each of them, by default here.
    """
    semaphore = semaphore or asyncio.Semaphore(max_concurrent)
    play = run or run_episode

    async def run_one(task: Task, sample: int) -> Trajectory:
        if recorded and (known := recorded.get((task.key, sample))) is not None:
            return known
        spans = None if tracer is None else EpisodeSpans()
        async with semaphore:
            if spans is not None:
                spans.end_queue()
            trajectory = await play(task, open_env, policy, limits, sample=sample, spans=spans)
        if tracer is not None and spans is not None:
            tracer.export(spans, trajectory)
        on_finished(trajectory)
        return trajectory

    async with asyncio.TaskGroup() as episodes:
        running = [
            [episodes.create_task(run_one(task, sample)) for sample in range(n_samples)]
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
