"""Engine pool: sticky sessions, load balancing, health and failover over several engines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from math import inf
from time import monotonic
from typing import Generic, Protocol, TypeVar

from skyfleet.chat.message import Message, ToolSpec
from skyfleet.chat.transcript import Completion
from skyfleet.engines.chat_engine import ChatCompletion, ChatEngine
from skyfleet.engines.engine import Engine
from skyfleet.engines.http_client import RefusedError
from skyfleet.engines.sampler import said_stop
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.errors import ConfigError, EngineError, EngineLostError, ModelError

logger = logging.getLogger(__name__)

EngineT = TypeVar("EngineT")


def living(engines: Sequence[EngineT]) -> list[EngineT]:
    """Those that have not died; EngineLostError if there is none."""
    left = [engine for engine in engines if not is_lost(engine)]
    if not left:
        names = ", ".join(getattr(engine, "name", type(engine).__name__) for engine in engines)
        raise EngineLostError(
            f"every engine has died ({names})",
            "start them again, and the same command goes on from the newest checkpoint",
        )
    return left


async def tell_living(
    engines: Sequence[EngineT], do: Callable[[EngineT], Awaitable[object]]
) -> None:
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


class Router(Seats[Engine]):
    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        decode_text: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        """`decode_text` is for stop strings that begin before a turn is broken off and end after."""
        super().__init__(engines)
        self._decode_text = decode_text

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
            said = self._joined(said, more, sampling.stop)
        return said

    async def sleep(self) -> None:
        await tell_living(self.engines, lambda engine: engine.sleep())

    async def wake(self) -> None:
        await tell_living(self.engines, lambda engine: engine.wake())

    async def _part(
        self, token_ids: Sequence[int], sampling: SamplingParams, session: str
    ) -> Completion:
        async def turn(engine: Engine) -> Completion:
            said = await engine.generate(token_ids, sampling, session=session)
            if said.finish == "abort" and not said.token_ids:
                # Asked again, it may do so forever.
                raise EngineError("the engine broke a turn off before its first token")
            return said

        return await self.ask(session, turn)

    def _joined(self, said: Completion, more: Completion, stops: Sequence[str]) -> Completion:
        token_ids, finish = list(said.token_ids), more.finish
        for token in more.token_ids:
            token_ids.append(token)
            # The engine saw the second part alone.
            if stops and self._decode_text and said_stop(stops, token_ids, self._decode_text):
                finish = "stop"
                break
        return Completion(
            token_ids=tuple(token_ids),
            logprobs=(said.logprobs + more.logprobs)[: len(token_ids)],
            finish=finish,
            policy_version=min(said.policy_version, more.policy_version),
        )


class ChatRouter(Seats[ChatEngine]):
    """A session that moves is rendered anew there, and its transcript may not go on."""

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        sampling: SamplingParams,
        *,
        session: str,
    ) -> ChatCompletion:
        return await self.ask(
            session, lambda engine: engine.chat(messages, tools, sampling, session=session)
        )
