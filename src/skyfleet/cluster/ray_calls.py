"""Calls of Ray actors with deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any


class ActorLostError(Exception):
    """The actor's process or node has ended, or it does not answer."""


async def call_actor(call: Awaitable[Any], timeout_seconds: float) -> Any:
    """The result of a call; ActorLostError if its process is gone or the deadline passes.

    What the method itself raises is raised here.
    """
    from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayTaskError

    try:
        async with asyncio.timeout(timeout_seconds):
            return await call
    except TimeoutError:
        raise ActorLostError(f"no answer within {timeout_seconds:g} s") from None
    except (RayActorError, ObjectLostError, GetTimeoutError) as error:
        raise ActorLostError(describe_loss(error)) from None
    except RayTaskError as error:
        if isinstance(error.cause, Exception):
            raise error.cause from None
        raise


def kill_actor(actor: Any) -> None:
    """End its process; an actor that has ended is ignored."""
    import ray

    with suppress(Exception):
        ray.kill(actor, no_restart=True)


def describe_loss(error: Exception) -> str:
    """The first line of Ray's paragraph."""
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    return lines[0] if lines else type(error).__name__
