"""A user with deadlines: a late message or a failed model is a failure of the user, as a value."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from skyfleet.envs.users.user import User, UserFailure, UserFailureKind, UserTurn
from skyfleet.errors import EpisodeError

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0


class TimedUser:
    def __init__(self, user: User, *, timeout_seconds: float) -> None:
        self._user, self._timeout_seconds = user, timeout_seconds

    async def open(self) -> UserTurn:
        return await self._ask(self._user.open)

    async def reply(self, agent_message: str) -> UserTurn:
        return await self._ask(lambda: self._user.reply(agent_message))

    async def aclose(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._user.aclose()
        except TimeoutError:
            logger.warning("a simulated user was not closed within %g s", CLOSE_SECONDS)

    async def _ask(self, ask: Callable[[], Awaitable[UserTurn]]) -> UserTurn:
        try:
            async with asyncio.timeout(self._timeout_seconds) as deadline:
                return await ask()
        except TimeoutError:
            if not deadline.expired():
                raise
            detail = (
                f"no message within {self._timeout_seconds:g} s (environment.user.timeout_seconds)"
            )
            return _fail(UserFailureKind.TIMEOUT, detail)
        except EpisodeError as error:
            return _fail(UserFailureKind.ENDPOINT, str(error))


def _fail(kind: UserFailureKind, detail: str) -> UserTurn:
    return UserTurn(text="", is_done=True, failure=UserFailure(kind=kind, detail=detail))
