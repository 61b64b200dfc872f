"""Opened: an env that is opened under a name, and always closed."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack

from skyfleet.envs.env import Env, EnvFactory
from skyfleet.errors import EnvError, wrap_errors
from skyfleet.tasks.task import Task

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
