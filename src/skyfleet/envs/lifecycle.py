"""Opened: an env that is opened under a name, and always closed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from skyfleet.envs.env import Env, EnvFactory
from skyfleet.errors import EnvError, blamed_on
from skyfleet.tasks.task import Task

logger = logging.getLogger(__name__)


@asynccontextmanager
async def opened(
    open_env: EnvFactory, task: Task, *, close_timeout_seconds: float = 30
) -> AsyncIterator[Env]:
    """The env of `task`. A close that fails or hangs is logged: the episode is over either way."""
    with blamed_on(EnvError, f"opening {task.env_key}"):
        env = await open_env(task)
    try:
        yield env
    finally:
        try:
            async with asyncio.timeout(close_timeout_seconds):
                await env.close()
        except Exception as error:
            logger.warning("closing %s for task %s: %r", task.env_key, task.key, error)
