"""Rollout workers as Ray actors: so many on every node, also on nodes that join later."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from skyfleet.cluster.episode_player import EpisodePlayer
from skyfleet.cluster.messages import FromWorker, ToWorker
from skyfleet.cluster.pool_worker import NodeLostError, WorkerLostError
from skyfleet.cluster.ray_calls import ActorLostError, call_actor, kill_actor
from skyfleet.cluster.ray_session import Node, RaySession
from skyfleet.cluster.rollout_pool import RolloutPool
from skyfleet.cluster.sources import MakeRenderer

logger = logging.getLogger(__name__)

POLL_SECONDS = 5.0
"""How long a worker waits for something to say."""
SILENT_SECONDS = 60.0
"""A worker that answers so much later is taken for dead: something holds its interpreter."""
START_SECONDS = 180.0
WATCH_SECONDS = 5.0
"""Between two looks at the nodes of the cluster."""


class RolloutWorker:
    """The actor. Its methods run in threads, beside the event loop of the episodes."""

    def __init__(self, path: Sequence[str]) -> None:
        """`path` is the driver's, so that its modules are found; those of the node come first."""
        sys.path += [entry for entry in path if entry not in sys.path]
        self._player = EpisodePlayer()
        self._player.forward_log()

    def start(self) -> int:
        return os.getpid()

    def send(self, messages: Sequence[ToWorker]) -> None:
        self._player.send(messages)

    def receive(self) -> list[FromWorker]:
        return self._player.receive(POLL_SECONDS)


class RayWorker:
    """A `WorkerConnection`."""

    def __init__(self, actor: Any, process_id: int) -> None:
        self._actor, self.process_id = actor, process_id

    async def send(self, messages: Sequence[ToWorker]) -> None:
        await self._call(self._actor.send.remote(messages), SILENT_SECONDS)

    async def receive(self) -> list[FromWorker]:
        messages: list[FromWorker] = await self._call(
            self._actor.receive.remote(), POLL_SECONDS + SILENT_SECONDS
        )
        return messages

    async def close(self) -> None:
        kill_actor(self._actor)

    async def _call(self, call: Awaitable[Any], timeout_seconds: float) -> Any:
        try:
            return await call_actor(call, timeout_seconds)
        except ActorLostError as error:
            raise WorkerLostError(str(error)) from None


@asynccontextmanager
async def open_rollout_pool(
    session: RaySession,
    *,
    workers_per_node: int,
    ready_timeout_seconds: float,
    make_renderer: MakeRenderer | None = None,
) -> AsyncIterator[RolloutPool]:
    pool = RolloutPool(make_renderer=make_renderer)
    known: set[str] = set()
    _add_workers(pool, session, session.nodes, known, workers_per_node)
    watching = asyncio.create_task(_watch_nodes(pool, session, known, workers_per_node))
    try:
        await pool.wait_ready(ready_timeout_seconds)
        yield pool
    finally:
        watching.cancel()
        await pool.close()


async def _watch_nodes(
    pool: RolloutPool, session: RaySession, known: set[str], workers_per_node: int
) -> None:
    """Start workers on nodes that join. A node that comes back is a new one for Ray."""
    while True:
        await asyncio.sleep(WATCH_SECONDS)
        with suppress(
            Exception
        ):  # the head is away for a while; the workers' own calls notice that
            _add_workers(pool, session, await session.list_nodes(), known, workers_per_node)


def _add_workers(
    pool: RolloutPool,
    session: RaySession,
    nodes: Sequence[Node],
    known: set[str],
    workers_per_node: int,
) -> None:
    for node in nodes:
        if node.id not in known:
            known.add(node.id)
            for number in range(workers_per_node):
                name = f"{number} on {node.address}"
                pool.add_worker(name, partial(_open_worker, session, node))


async def _open_worker(session: RaySession, node: Node) -> RayWorker:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if node.id not in {living.id for living in await session.list_nodes()}:
        raise NodeLostError(f"node {node.address} has left the cluster")
    worker: Any = RolloutWorker
    actor = (
        ray.remote(worker)
        .options(
            num_cpus=1,
            max_restarts=0,
            max_concurrency=3,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
        )
        .remote(_list_import_paths())
    )
    try:
        return RayWorker(actor, await call_actor(actor.start.remote(), START_SECONDS))
    except BaseException as error:
        kill_actor(actor)
        if isinstance(error, ActorLostError):
            raise WorkerLostError(str(error)) from None
        raise


def _list_import_paths() -> list[str]:
    return [os.path.abspath(entry or ".") for entry in sys.path]
