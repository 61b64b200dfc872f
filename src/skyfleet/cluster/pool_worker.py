"""PoolWorker: a rollout worker of the pool, and the connection to its process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from skyfleet.cluster.messages import FromWorker, ToWorker
from skyfleet.cluster.plays import Play


class WorkerLostError(Exception):
    """The worker's process or node has ended, or does not answer."""


class NodeLostError(WorkerLostError):
    """The worker cannot be started again: its node is gone."""


class WorkerConnection(Protocol):
    """Each method raises WorkerLostError within a deadline of its own."""

    async def send(self, messages: Sequence[ToWorker]) -> None: ...

    async def receive(self) -> list[FromWorker]:
        """Wait a while for messages; empty if there are none."""
        ...

    async def close(self) -> None: ...


OpenWorker = Callable[[], Awaitable[WorkerConnection]]
"""Starts a worker; called again when it has died."""


@dataclass(slots=True, eq=False)
class PoolWorker:
    name: str
    open: OpenWorker
    connection: WorkerConnection | None = None
    plays: dict[int, Play] = field(default_factory=dict)
    outbox: list[ToWorker] = field(default_factory=list)
    has_messages: asyncio.Event = field(default_factory=asyncio.Event)
    known: set[int] = field(default_factory=set)
    """Sources that this process has."""
    task: asyncio.Task[None] | None = None

    def post(self, *messages: ToWorker) -> None:
        self.outbox += messages
        self.has_messages.set()

    def accepts(self, play: Play) -> bool:
        if self.connection is None:
            return False
        return not self.plays or not (
            play.is_suspect or any(other.is_suspect for other in self.plays.values())
        )
