"""Seats: several engines, and which of them a session asks.

A session stays with the engine that has its cache; a new one goes where fewest are. A prompt holds
the whole conversation, so whatever happens to an engine, its sessions go on elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from math import inf
from time import monotonic
from typing import Generic, Protocol, TypeVar

from skyfleet.engines.living import is_lost, living
from skyfleet.engines.posting import RefusedError
from skyfleet.errors import ConfigError, EngineLostError, ModelError

logger = logging.getLogger(__name__)

REST_SECONDS = 30.0
"""For which an engine that failed is asked last; then one turn at a time, until it gives one."""


class Seated(Protocol):
    policy_version: int

    async def release(self, session: str) -> None: ...


E = TypeVar("E", bound=Seated)
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Seat(Generic[E]):
    number: int
    engine: E
    sessions: set[str] = field(default_factory=set)
    failed_at: float = -inf
    is_trusted: bool = True
    """It has given a turn since it failed."""
    n_running: int = 0

    @property
    def is_last_resort(self) -> bool:
        rests = monotonic() - self.failed_at < REST_SECONDS
        return rests or (not self.is_trusted and self.n_running > 0)

    def fail(self) -> None:
        self.failed_at, self.is_trusted = monotonic(), False


class Seats(Generic[E]):
    def __init__(self, engines: Sequence[E]) -> None:
        if not engines:
            raise ConfigError("engines=[]; a router needs at least one")
        self._seats = [_Seat(number, engine) for number, engine in enumerate(engines)]
        self._homes: dict[str, _Seat[E]] = {}
        self._pauses = self._n_running = 0
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()

    @property
    def engines(self) -> list[E]:
        return [seat.engine for seat in self._seats]

    @property
    def policy_version(self) -> int:
        """The oldest that is served."""
        return min(engine.policy_version for engine in living(self.engines))

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        for seat in self._seats:
            seat.engine.policy_version = version

    async def release(self, session: str) -> None:
        seat = self._homes.pop(session, None)
        if seat is not None:
            seat.sessions.discard(session)
            await seat.engine.release(session)

    @asynccontextmanager
    async def paused(self, *, wait: bool) -> AsyncIterator[None]:
        """No turn begins in here. `wait` lets those under way end first; else they run on."""
        self._pauses += 1
        self._open.clear()
        try:
            if wait:
                await self._idle.wait()
            yield
        finally:
            self._pauses -= 1
            if self._pauses == 0:
                self._open.set()

    async def ask(self, session: str, turn: Callable[[E], Awaitable[T]]) -> T:
        """From the first engine that gives it. An error that all of them give is the request's."""
        await self._open.wait()
        failed: list[tuple[_Seat[E], Exception]] = []
        for seat in self._order(session):
            await self._move(session, seat)
            begun = monotonic()
            try:
                with self._counted(seat):
                    said = await turn(seat.engine)
            except RefusedError:
                self._blame(failed, session, seat)
                raise
            except EngineLostError as error:
                failed.append((seat, error))
                continue
            except ModelError:
                raise
            except asyncio.CancelledError:
                # So ends an episode's time; what gave nothing for that long may hang.
                hangs = [seat] if monotonic() - begun > REST_SECONDS else []
                for doubtful in (*hangs, *(other for other, _ in failed)):
                    doubtful.fail()
                raise
            except Exception as error:
                failed.append((seat, error))
                continue
            self._blame(failed, session, seat)
            return said
        # That one has died is the run's matter only if nobody is left to be asked.
        errors = [error for _, error in failed]
        raise next((e for e in errors if not isinstance(e, EngineLostError)), errors[-1])

    def _blame(
        self, failed: Sequence[tuple[_Seat[E], Exception]], session: str, answered: _Seat[E]
    ) -> None:
        answered.is_trusted = True
        left_out = ", which is not asked again in this run,"
        for seat, problem in failed:
            # Once until it answers again, and not for each of its sessions.
            logger.log(
                logging.WARNING if seat.is_trusted else logging.DEBUG,
                "engine %d%s failed and session %s went on at engine %d: %s",
                *(seat.number, left_out if is_lost(seat.engine) else ""),
                *(session, answered.number, getattr(problem, "reason", problem)),
            )
            seat.fail()

    def _order(self, session: str) -> list[_Seat[E]]:
        home = self._homes.get(session)
        living(self.engines)
        return sorted(
            (seat for seat in self._seats if not is_lost(seat.engine)),
            key=lambda seat: (seat.is_last_resort, seat is not home, len(seat.sessions)),
        )

    async def _move(self, session: str, seat: _Seat[E]) -> None:
        home = self._homes.get(session)
        if home is seat:
            return
        self._homes[session] = seat
        seat.sessions.add(session)
        if home is not None:
            home.sessions.discard(session)
            with suppress(Exception):  # it failed, and may well fail at this too
                await home.engine.release(session)

    @contextmanager
    def _counted(self, seat: _Seat[E]) -> Iterator[None]:
        self._n_running += 1
        seat.n_running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._n_running -= 1
            seat.n_running -= 1
            if self._n_running == 0:
                self._idle.set()
