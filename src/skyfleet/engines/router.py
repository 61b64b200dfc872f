"""Router: several engines as one.

A session stays with the engine that has its cache; a new one goes where fewest are. A prompt holds
the whole conversation, so whatever happens to an engine, its sessions go on elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from time import monotonic

from skyfleet.chat.completion import Completion
from skyfleet.engines.engine import Engine
from skyfleet.engines.posting import RefusedError
from skyfleet.engines.sampling import SamplingParams
from skyfleet.errors import ConfigError

logger = logging.getLogger(__name__)

REST_SECONDS = 30.0
"""For which an engine that failed is asked last."""


@dataclass(slots=True, eq=False)
class _Seat:
    number: int
    engine: Engine
    sessions: set[str] = field(default_factory=set)
    rests_until: float = 0.0


class Router:
    def __init__(self, engines: Sequence[Engine]) -> None:
        if not engines:
            raise ConfigError("engines=[]; a router needs at least one")
        self._seats = [_Seat(number, engine) for number, engine in enumerate(engines)]
        self._homes: dict[str, _Seat] = {}
        self._pauses = self._n_running = 0
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()

    @property
    def policy_version(self) -> int:
        """The oldest that is served."""
        return min(seat.engine.policy_version for seat in self._seats)

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        for seat in self._seats:
            seat.engine.policy_version = version

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
    ) -> Completion:
        """A turn that its engine broke off, as vLLM does for new weights, goes on from its tokens."""
        said = await self._part(token_ids, sampling, session)
        while said.finish == "abort":
            left = sampling.max_generate_length - len(said.token_ids)
            if left == 0:
                return replace(said, finish="length")
            shorter = replace(sampling, max_generate_length=left)
            more = await self._part((*token_ids, *said.token_ids), shorter, session)
            said = _joined(said, more)
        return said

    async def release(self, session: str) -> None:
        seat = self._homes.pop(session, None)
        if seat is not None:
            seat.sessions.discard(session)
            await seat.engine.release(session)

    async def sleep(self) -> None:
        await asyncio.gather(*(seat.engine.sleep() for seat in self._seats))

    async def wake(self) -> None:
        await asyncio.gather(*(seat.engine.wake() for seat in self._seats))

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

    async def _part(
        self, token_ids: Sequence[int], sampling: SamplingParams, session: str
    ) -> Completion:
        """From the first engine that gives it. An error that all of them give is the request's."""
        await self._open.wait()
        failed: list[tuple[_Seat, Exception]] = []
        for seat in self._order(session):
            await self._move(session, seat)
            try:
                with self._counted():
                    said = await seat.engine.generate(token_ids, sampling, session=session)
            except RefusedError:
                raise
            except Exception as error:
                failed.append((seat, error))
                continue
            for other, problem in failed:
                other.rests_until = monotonic() + REST_SECONDS
                logger.warning(
                    "engine %d failed and session %s went on at engine %d: %s",
                    *(other.number, session, seat.number, problem),
                )
            return said
        raise failed[0][1]

    def _order(self, session: str) -> list[_Seat]:
        home, now = self._homes.get(session), monotonic()
        return sorted(
            self._seats,
            key=lambda seat: (seat.rests_until > now, seat is not home, len(seat.sessions)),
        )

    async def _move(self, session: str, seat: _Seat) -> None:
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
    def _counted(self) -> Iterator[None]:
        self._n_running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._n_running -= 1
            if self._n_running == 0:
                self._idle.set()


def _joined(said: Completion, more: Completion) -> Completion:
    return Completion(
        token_ids=said.token_ids + more.token_ids,
        logprobs=said.logprobs + more.logprobs,
        finish=more.finish,
        policy_version=min(said.policy_version, more.policy_version),
    )
