"""Living: what several engines are told at once goes on without those that have died."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from skyfleet.errors import EngineLostError

logger = logging.getLogger(__name__)

E = TypeVar("E")


def living(engines: Sequence[E]) -> list[E]:
    """Those that have not died; EngineLostError if there is none."""
    left = [engine for engine in engines if not is_lost(engine)]
    if not left:
        names = ", ".join(getattr(engine, "name", type(engine).__name__) for engine in engines)
        raise EngineLostError(
            f"every engine has died ({names})",
            "start them again, and the same command goes on from the newest checkpoint",
        )
    return left


async def tell_living(engines: Sequence[E], do: Callable[[E], Awaitable[object]]) -> None:
    """All at once. One that dies of it is left out from then on, unless it was the last."""
    told = living(engines)
    results = await asyncio.gather(*(do(engine) for engine in told), return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    lost = [error for error in errors if isinstance(error, EngineLostError)]
    for error in errors:
        if error not in lost or len(lost) == len(told):
            raise error
    for error in lost:
        logger.warning("the others go on without it in this run: %s", error.reason)


def is_lost(engine: object) -> bool:
    """Only an engine that is trained can be: any other is asked again when it is back."""
    return bool(getattr(engine, "is_lost", False))
