"""Engine pool: load balancing, sticky sessions, health and failover over several engines.

A dead engine is one whose `is_dead` is True: it is never used again in this run. An engine that
merely failed gets no requests for `COOLDOWN_SECONDS`, then one at a time until it succeeds.
"""

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
from skyfleet.engines.engine_downtime import LossMeter
from skyfleet.engines.http_client import RequestRejectedError
from skyfleet.engines.sampler import ends_with_stop
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.errors import ConfigError, EngineError, EngineLostError, ModelError

logger = logging.getLogger(__name__)

COOLDOWN_SECONDS = 30.0
"""How long a failed engine is the last choice."""
MAX_RESTARTS = 8
"""A request that so many restarts of engines have interrupted fails."""


class PooledEngine(Protocol):
    policy_version: int

    async def release(self, session: str) -> None: ...


AnyEngineT = TypeVar("AnyEngineT")
EngineT = TypeVar("EngineT", bound=PooledEngine)
ResultT = TypeVar("ResultT")


def is_dead(engine: object) -> bool:
    """Only a trained vLLM engine can be dead: what restarts in its place has other weights."""
    return bool(getattr(engine, "is_dead", False))


def is_restarting(engine: object) -> bool:
    """An engine in an actor that died: requests wait until it has the current weights."""
    return bool(getattr(engine, "is_restarting", False))


def healthy(engines: Sequence[AnyEngineT]) -> list[AnyEngineT]:
    """The healthy engines; EngineLostError if all are dead."""
    alive = [engine for engine in engines if not is_dead(engine)]
    if not alive:
        names = ", ".join(getattr(engine, "name", type(engine).__name__) for engine in engines)
        raise EngineLostError(
            f"every engine is dead ({names})",
            "restart them, then run the same command to resume from the latest checkpoint",
        )
    return alive


async def broadcast(
    engines: Sequence[AnyEngineT], call: Callable[[AnyEngineT], Awaitable[object]]
) -> None:
    """Call all healthy engines concurrently.

    An engine that dies is left out, unless it was the last.
    """
    called = healthy(engines)
    results = await asyncio.gather(*(call(engine) for engine in called), return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    deaths = [error for error in errors if isinstance(error, EngineLostError)]
    for error in errors:
        if error not in deaths or len(deaths) == len(called):
            raise error
    for error in deaths:
        logger.warning("the run continues without a dead engine: %s", error.reason)


@dataclass(slots=True, eq=False)
class _Replica(Generic[EngineT]):
    number: int
    engine: EngineT
    sessions: set[str] = field(default_factory=set)
    failed_at: float = -inf
    is_trusted: bool = True
    """It has completed a request since its last failure."""
    n_running: int = 0

    @property
    def is_last_resort(self) -> bool:
        cools_down = monotonic() - self.failed_at < COOLDOWN_SECONDS
        return cools_down or (not self.is_trusted and self.n_running > 0)

    def mark_failed(self) -> None:
        self.failed_at, self.is_trusted = monotonic(), False


class ReplicaPool(Generic[EngineT]):
    """Routes each session to the replica that has its cache, and to another one if that fails."""

    def __init__(self, engines: Sequence[EngineT]) -> None:
        if not engines:
            raise ConfigError("engines=[]; a pool needs at least one engine")
        self._replicas = [_Replica(number, engine) for number, engine in enumerate(engines)]
        self._replica_by_session: dict[str, _Replica[EngineT]] = {}
        self._n_pauses = self._n_running = 0
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()

    @property
    def engines(self) -> list[EngineT]:
        return [replica.engine for replica in self._replicas]

    @property
    def policy_version(self) -> int:
        """The oldest version among healthy engines."""
        return min(engine.policy_version for engine in healthy(self.engines))

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        for replica in self._replicas:
            replica.engine.policy_version = version

    async def release(self, session: str) -> None:
        replica = self._replica_by_session.pop(session, None)
        if replica is not None:
            replica.sessions.discard(session)
            await replica.engine.release(session)

    @asynccontextmanager
    async def paused(self, *, wait: bool) -> AsyncIterator[None]:
        """Start no request inside the context. `wait` waits for running ones first."""
        self._n_pauses += 1
        self._open.clear()
        try:
            if wait:
                await self._idle.wait()
            yield
        finally:
            self._n_pauses -= 1
            if self._n_pauses == 0:
                self._open.set()

    async def request(self, session: str, call: Callable[[EngineT], Awaitable[ResultT]]) -> ResultT:
        """Return the result of the first replica that succeeds; raise if all of them fail.

        If one that failed is started again, the request waits for it.
        """
        for _ in range(MAX_RESTARTS):
            try:
                return await self._request_once(session, call)
            except RequestRejectedError:
                raise
            except EngineError:
                if not any(is_restarting(replica.engine) for replica in self._replicas):
                    raise
        return await self._request_once(session, call)

    async def _request_once(
        self, session: str, call: Callable[[EngineT], Awaitable[ResultT]]
    ) -> ResultT:
        await self._open.wait()
        failed: list[tuple[_Replica[EngineT], Exception]] = []
        for replica in self._candidates(session):
            await self._assign(session, replica)
            started, meter = monotonic(), LossMeter()
            try:
                with self._counted(replica):
                    result = await call(replica.engine)
            except RequestRejectedError:
                # The request is at fault, and the replica works.
                self._record_success(replica, failed, session)
                raise
            except EngineLostError as error:
                meter.record_failure(error)
                failed.append((replica, error))
                continue
            except ModelError:
                raise
            except asyncio.CancelledError:
                # Usually an episode's timeout: a replica without a result for so long may hang.
                hangs = [replica] if monotonic() - started > COOLDOWN_SECONDS else []
                for suspect in (*hangs, *(other for other, _ in failed)):
                    suspect.mark_failed()
                raise
            except Exception as error:
                meter.record_failure(error)
                failed.append((replica, error))
                continue
            self._record_success(replica, failed, session)
            return result
        # A dead engine stops the run only if every other replica is dead too.
        errors = [error for _, error in failed]
        raise next((e for e in errors if not isinstance(e, EngineLostError)), errors[-1])

    def _record_success(
        self,
        replica: _Replica[EngineT],
        failed: Sequence[tuple[_Replica[EngineT], Exception]],
        session: str,
    ) -> None:
        """Trust `replica`, and log the replicas that failed before it."""
        replica.is_trusted = True
        for other, problem in failed:
            # Warn once until it succeeds again, not once per session.
            logger.log(
                logging.WARNING if other.is_trusted else logging.DEBUG,
                "engine %d failed%s, session %s continues on engine %d: %s",
                *(other.number, " and is not used again" if is_dead(other.engine) else ""),
                *(session, replica.number, getattr(problem, "reason", problem)),
            )
            other.mark_failed()

    def _candidates(self, session: str) -> list[_Replica[EngineT]]:
        """Healthy replicas: reliable before failed ones, the session's own first, then least
        loaded."""
        healthy(self.engines)
        own = self._replica_by_session.get(session)
        return sorted(
            (replica for replica in self._replicas if not is_dead(replica.engine)),
            key=lambda replica: (
                is_restarting(replica.engine),
                replica.is_last_resort,
                replica is not own,
                len(replica.sessions),
            ),
        )

    async def _assign(self, session: str, replica: _Replica[EngineT]) -> None:
        previous = self._replica_by_session.get(session)
        if previous is replica:
            return
        self._replica_by_session[session] = replica
        replica.sessions.add(session)
        if previous is not None:
            previous.sessions.discard(session)
            with suppress(Exception):  # it failed, and may fail at this too
                await previous.engine.release(session)

    @contextmanager
    def _counted(self, replica: _Replica[EngineT]) -> Iterator[None]:
        self._n_running += 1
        replica.n_running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._n_running -= 1
            replica.n_running -= 1
            if self._n_running == 0:
                self._idle.set()


class EnginePool(ReplicaPool[Engine]):
    """Several engines as one Engine."""

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        decode_text: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        """`decode_text` finds stop strings that span an aborted turn and its continuation."""
        super().__init__(engines)
        self._decode_text = decode_text

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
    ) -> Completion:
        """Generate a turn.

        If an engine aborts it, as vLLM does for new weights, continue from its tokens.
        """
        completion = await self._generate_part(token_ids, sampling, session)
        while completion.finish == "abort":
            n_left = sampling.max_generate_length - len(completion.token_ids)
            if n_left == 0:
                return replace(completion, finish="length")
            rest = replace(sampling, max_generate_length=n_left)
            prompt = (*token_ids, *completion.token_ids)
            more = await self._generate_part(prompt, rest, session)
            completion = self._join(completion, more, sampling.stop)
        return completion

    async def sleep(self) -> None:
        await broadcast(self.engines, lambda engine: engine.sleep())

    async def wake(self) -> None:
        await broadcast(self.engines, lambda engine: engine.wake())

    async def _generate_part(
        self, token_ids: Sequence[int], sampling: SamplingParams, session: str
    ) -> Completion:
        async def call(engine: Engine) -> Completion:
            completion = await engine.generate(token_ids, sampling, session=session)
            if completion.finish == "abort" and not completion.token_ids:
                # A retry on the same engine might abort forever.
                raise EngineError("the engine aborted a turn before its first token")
            return completion

        return await self.request(session, call)

    def _join(self, first: Completion, second: Completion, stops: Sequence[str]) -> Completion:
        token_ids, finish = list(first.token_ids), second.finish
        for token in second.token_ids:
            token_ids.append(token)
            # The engine saw only the second part.
            if stops and self._decode_text and ends_with_stop(stops, token_ids, self._decode_text):
                finish = "stop"
                break
        return Completion(
            token_ids=tuple(token_ids),
            logprobs=(first.logprobs + second.logprobs)[: len(token_ids)],
            finish=finish,
            policy_version=first.policy_version,
            version_changes=tuple(
                (at, version)
                for at, version in _join_versions(first, second)
                if at < len(token_ids)
            ),
        )


def _join_versions(first: Completion, second: Completion) -> list[tuple[int, int]]:
    """The version changes of a completion that another engine call continued."""
    n, changes = len(first.token_ids), list(first.version_changes)
    newest = changes[-1][1] if changes else first.policy_version
    if second.policy_version != newest:
        changes.append((n, second.policy_version))
    return changes + [(n + at, version) for at, version in second.version_changes]


class ChatEnginePool(ReplicaPool[ChatEngine]):
    """Several chat engines as one ChatEngine.

    A session that moves is rendered again there, so its transcript may start over.
    """

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        sampling: SamplingParams,
        *,
        session: str,
    ) -> ChatCompletion:
        return await self.request(
            session, lambda engine: engine.chat(messages, tools, sampling, session=session)
        )
