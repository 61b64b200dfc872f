"""The Env protocol: one episode of one task, opened, stepped, graded, closed and then discarded."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol, TypeGuard, runtime_checkable

from skyfleet.chat.message import Message, ToolSpec
from skyfleet.envs.guard import EnvGuard
from skyfleet.envs.guarded_call import MAX_ABANDONED, abandoned_calls
from skyfleet.envs.values import format_value
from skyfleet.envs.verifiers.run_verifier import SUCCESS_REWARD
from skyfleet.errors import EnvError, EpisodeError
from skyfleet.tasks.task import Grade, Task
from skyfleet.trajectories.episode_clock import EpisodeClock
from skyfleet.trajectories.trajectory import Ending

logger = logging.getLogger(__name__)

DONE = "<done>"
"""The text by which an agent declares that it has finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The prompt and the tools that an episode starts with."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    use_native_tool_calling: bool | None = None
    """Whether tools and calls go through the engine's chat API; None: as the run is configured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The environment's answer to one action."""

    messages: tuple[Message, ...] = ()
    done: bool = False
    reward: float = 0.0
    """For this step. Without `Env.grade` the sum over all steps is the episode's reward; with it,
    step rewards break the grade down by turn."""
    info: Mapping[str, float] = field(default_factory=dict)
    """Numbers that become the metrics `environment/{env_key}/{name}`; other values are left out."""
    keep_recent_turns: int | None = None
    """Cut the agent's history to the prompt, this turn and so many turns before it; None keeps all."""
    opening: Observation | None = None
    """Restart the conversation: the agent continues from these messages and tools alone."""
    success: bool | None = None
    """For an environment without `grade`: whether the task is solved. The last value counts; None:
    it is solved when the step rewards add up to at least 1.0."""


class Env(Protocol):
    """One episode. Two more methods are optional:

    `async def grade(self) -> Grade | None` judges the episode as it stands; it is called once,
    whether the episode finished or was cut short. None means that it could not be judged, so the
    attempt counts in no mean and no loss. Without `grade` the episode earns the sum of its step
    rewards.

    `async def close(self) -> None` releases everything the episode holds. It is always called, and
    may be called twice.
    """

    async def reset(self) -> Observation: ...

    async def step(self, action: Message) -> Step: ...


@runtime_checkable
class GradedEnv(Protocol):
    """An Env that judges its own episode."""

    async def grade(self) -> Grade | None: ...


@runtime_checkable
class ClosableEnv(Protocol):
    """An Env that holds something to release."""

    async def close(self) -> None: ...


EnvFactory = Callable[[Task], Awaitable[Env]]

episode_ending: ContextVar[Ending | None] = ContextVar("episode_ending", default=None)
"""While an episode is graded, how it ended: an environment does not see every limit itself."""

episode_info: ContextVar[dict[str, float] | None] = ContextVar("episode_info", default=None)
"""While an episode is graded, a dict for the numbers that an adapter knows at the end only. They
are added to the `info` of the last turn."""


async def open_env_until(
    closing: AsyncExitStack,
    open_env: EnvFactory,
    task: Task,
    *,
    guard: EnvGuard | None = None,
    close_timeout_seconds: float = 30,
) -> Env:
    """Open the environment of `task` and close it when `closing` is closed."""
    if guard is None:
        guard = EnvGuard(task.env_key, task.key)
        guard.calls_key = (task.env_key, id(open_env))
    if (n := abandoned_calls.count(guard.calls_key)) >= MAX_ABANDONED:
        raise EnvError(
            f"opening {task.env_key}: {n} of its calls were abandoned and still run, so it is not "
            "opened again; let its methods end when they are cancelled, or set "
            "environment.isolation=process"
        )
    env: Env = await guard.call(EnvError, f"opening {task.env_key}", open_env, task)
    closing.push_async_callback(_close_logged, env, task, guard, close_timeout_seconds)
    if not hasattr(type(env), "reset"):
        await guard.call(EnvError, f"opening {task.env_key}", _check_env, env, task)
    return env


async def _check_env(env: object, task: Task) -> None:
    """Called by the guard: looking at an object may run its code."""
    if not hasattr(env, "reset"):
        raise EnvError(f"opening {task.env_key} returned {format_value(env)}, not an environment")


async def grade_env(env: Env, steps: Sequence[Step]) -> Grade | None:
    """The reward of an episode (reward function) is computed here.

    It is the environment's own grade or, for an environment without `grade`, the sum of its step
    rewards.
    """
    if is_graded_by_env(env):
        return await env.grade()
    return sum_step_rewards(steps)


def is_graded_by_env(env: Env) -> TypeGuard[GradedEnv]:
    """Whether it has a grade of its own; `isinstance` takes a tenth of a short episode."""
    return getattr(env, "grade", None) is not None


def sum_step_rewards(steps: Sequence[Step]) -> Grade:
    """Grade an episode by its step rewards.

    The last `Step.success` that is not None decides the success; without one, a sum of at least
    1.0 does.
    """
    reward = float(sum(step.reward for step in steps))
    verdicts = [step.success for step in steps if step.success is not None]
    return Grade(
        reward=reward,
        success=bool(verdicts[-1]) if verdicts else reward >= SUCCESS_REWARD,
        parts={f"turn_{turn}": float(step.reward) for turn, step in enumerate(steps)},
    )


async def close_env(env: Env) -> None:
    """Close an environment that can be closed."""
    close = getattr(env, "close", None)
    if close is not None:
        await close()


async def _close_logged(env: Env, task: Task, guard: EnvGuard, timeout_seconds: float) -> None:
    """Log a close that fails or hangs: the episode is over either way."""
    try:
        async with EpisodeClock(timeout_seconds):
            await guard.call(EnvError, "close", close_env, env)
    except TimeoutError:
        logger.warning(
            "closing %s for task %s: not finished after %g s (environment.close_timeout_seconds)",
            task.env_key,
            task.key,
            timeout_seconds,
        )
    except EpisodeError as error:
        reason = str(error).removeprefix("close: ")
        logger.warning("closing %s for task %s: %s", task.env_key, task.key, reason)
