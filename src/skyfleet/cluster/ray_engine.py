"""RayEngine: an engine in a Ray actor, started again with the current weights when it dies."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from skyfleet.chat.transcript import Completion
from skyfleet.cluster.engine_actors import GroupPlace
from skyfleet.cluster.ray_calls import ActorLostError, call_actor, kill_actor
from skyfleet.engines.engine_downtime import record_engine_downtime
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.errors import EngineError, EngineLostError

logger = logging.getLogger(__name__)

START_SECONDS = 600.0
"""For an actor's process, its model and the engine."""
GENERATE_SECONDS = 900.0
CALL_SECONDS = 120.0
PING_INTERVAL_SECONDS, PING_SECONDS = 5.0, 120.0
"""A large prefill blocks the actor's event loop for seconds."""
MAX_STARTS = 5
"""An engine that cannot be started so often in a row is dead."""
REMEDY = "run the same command to resume from the latest checkpoint"

CreateActor = Callable[[], Any]
Restore = Callable[["RayEngine"], Awaitable[None]]
"""Gives an engine that was started again the current weights."""


class RayEngine:
    def __init__(self, name: str, create: CreateActor, restore: Restore) -> None:
        self.name, self.policy_version = name, 0
        self.is_dead = False
        self.n_restarts = 0
        self.process_id = 0
        self._create, self._restore = create, restore
        self._actor: Any = None
        self._ready = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = self._is_updating = False

    @property
    def is_restarting(self) -> bool:
        """Requests wait until it has the current weights, and so does nobody who has another."""
        return not self._ready.is_set()

    @property
    def has_process(self) -> bool:
        """Whether it can join a transfer group."""
        return self._actor is not None and not self.is_dead

    async def start(self) -> None:
        """Start it without weights: the caller pushes them before the first request."""
        await self._start_actor()
        self._ready.set()
        self._run(self._watch())

    async def close(self) -> None:
        self._is_closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._actor is not None:
            kill_actor(self._actor)

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
    ) -> Completion:
        import ray

        await self._wait_ready()
        actor = self._actor
        call = actor.generate.remote(array("q", token_ids), sampling, session)
        try:
            completion: Completion = await call_actor(call, GENERATE_SECONDS)
            return completion
        except ActorLostError as error:
            self._note_loss(actor, error)
            raise EngineError(f"{self.name} died: {error}") from None
        except asyncio.CancelledError:
            with suppress(Exception):  # it may be over
                ray.cancel(call)
            raise

    async def release(self, session: str) -> None:
        if not self.is_restarting:
            with suppress(ActorLostError):
                await self._call("release", session)

    async def sleep(self) -> None:
        with suppress(ActorLostError):  # one that is started again is awake, and has no cache
            await self._call("sleep")

    async def wake(self) -> None:
        with suppress(ActorLostError):
            await self._call("wake")

    async def join(self, place: GroupPlace) -> None:
        await self._call("join", place)

    async def leave(self) -> None:
        await self._call("leave")

    async def receive_weights(self, *, policy_version: int) -> None:
        self._is_updating = True
        try:
            await self._call("receive_weights", policy_version)
        finally:
            self._is_updating = False

    async def _call(self, method: str, *arguments: Any) -> Any:
        actor = self._actor
        if actor is None:
            raise ActorLostError(f"{self.name} is started again")
        try:
            return await call_actor(getattr(actor, method).remote(*arguments), CALL_SECONDS)
        except ActorLostError as error:
            self._note_loss(actor, error)
            raise

    async def _wait_ready(self) -> None:
        """The time counts as lost on the clock of the episode."""
        while self.is_restarting:
            started = monotonic()
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._ready.wait()
            record_engine_downtime(monotonic() - started, f"{self.name} is started again")
        if self.is_dead:
            raise EngineLostError(f"{self.name} could not be started again", REMEDY)

    def _note_loss(self, actor: Any, error: ActorLostError) -> None:
        """Its process is gone or hangs: start another one, once."""
        if actor is not self._actor or self._is_closed:
            return
        logger.warning("%s is started again: %s", self.name, error)
        self._actor = None
        self._ready.clear()
        kill_actor(actor)
        self._run(self._restart())

    async def _restart(self) -> None:
        for attempt in range(MAX_STARTS):
            await asyncio.sleep(float(attempt))
            try:
                await self._start_actor()
                await self._restore(self)
            except (
                Exception
            ) as error:  # also of Ray and of the transfer: requests wait for the end of this
                logger.warning("%s did not start: %s: %s", self.name, type(error).__name__, error)
                if self._actor is not None:
                    kill_actor(self._actor)
                    self._actor = None
                continue
            self.n_restarts += 1
            break
        else:
            self.is_dead = True
        self._ready.set()

    async def _start_actor(self) -> None:
        actor = self._create()
        try:
            self.process_id = await call_actor(actor.start.remote(), START_SECONDS)
        except BaseException:
            kill_actor(actor)
            raise
        self._actor = actor

    async def _watch(self) -> None:
        """Notice a death without a request, and an engine that hangs."""
        while not self.is_dead:
            await asyncio.sleep(PING_INTERVAL_SECONDS)
            actor = self._actor
            if actor is None or self._is_updating:
                continue
            try:
                await call_actor(actor.ping.remote(), PING_SECONDS)
            except ActorLostError as error:
                self._note_loss(actor, error)
            except Exception as error:
                self._note_loss(actor, ActorLostError(f"{type(error).__name__}: {error}"))

    def _run(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class RayVllmEngine(RayEngine):
    """An `UpdatableEngine` of `weight_sync/vllm.py`. Never run here: vLLM needs another machine."""

    supports_cuda_ipc = True
    remedy = REMEDY

    def __init__(
        self, name: str, create: CreateActor, restore: Restore, *, model_dtype: str
    ) -> None:
        super().__init__(name, create, restore)
        self.model_dtype = model_dtype

    async def collective_rpc(self, method: str, *arguments: Any) -> list[Any]:
        results: list[Any] = await self._call("collective_rpc", method, *arguments)
        return results

    async def update_weights(
        self, method: str, argument: str | bytes, *, policy_version: int
    ) -> None:
        await self._call("update_weights", method, argument, policy_version)
        self.policy_version = policy_version
