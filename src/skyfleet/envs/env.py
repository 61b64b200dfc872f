"""Env: one episode of one task. Open it, step it, grade it, close it, discard it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Protocol

from skyfleet.chat.message import Message, ToolSpec
from skyfleet.errors import EnvError, wrap_errors
from skyfleet.tasks.task import Grade, Task

DONE = "<done>"
"""What an agent says when it has finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the agent finds when the episode starts."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What the world answers."""

    messages: tuple[Message, ...] = ()
    done: bool = False
    reward: float = 0.0
    """For this step only; the grade is separate."""
    info: Mapping[str, float] = field(default_factory=dict)
    keep_recent_turns: int | None = None
    """Of the agent's past only the opening, this turn and so many before it stay in its context;
    None keeps all."""
    opening: Observation | None = None
    """The agent goes on with these messages and tools alone, as if it began here."""


class Env(Protocol):
    async def reset(self) -> Observation: ...

    async def step(self, action: Message) -> Step: ...

    async def grade(self) -> Grade | None:
        """Judge the world as it stands. Called once, finished or cut short.

        None: it could not be judged, so the attempt counts in no mean and no loss.
        """
        ...

    async def close(self) -> None:
        """Give everything back. Safe to call twice."""
        ...


EnvFactory = Callable[[Task], Awaitable[Env]]


logger = logging.getLogger(__name__)


async def opened(
    open_env: EnvFactory,
    task: Task,
    closing: AsyncExitStack,
    *,
    close_timeout_seconds: float = 30,
) -> Env:
    """The env of `task`, closed when `closing` is."""
    with wrap_errors(EnvError, f"opening {task.env_key}"):
        env = await open_env(task)
    closing.push_async_callback(_close, env, task, close_timeout_seconds)
    return env


async def _close(env: Env, task: Task, timeout_seconds: float) -> None:
    """What fails or hangs is logged: the episode is over either way."""
    try:
        async with asyncio.timeout(timeout_seconds):
            await env.close()
    except Exception as error:
        logger.warning("closing %s for task %s: %r", task.env_key, task.key, error)
