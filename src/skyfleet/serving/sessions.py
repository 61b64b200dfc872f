"""Sessions: the engine's sessions, each used by one request at a time, the oldest given up first."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from skyfleet.engines.engine import Engine


@dataclass(slots=True)
class _Session:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    n_users: int = 0


class Sessions:
    def __init__(self, engine: Engine, *, most: int) -> None:
        """`most` are remembered while nobody uses them, so that they can go on from their cache."""
        self._engine, self._most = engine, most
        self._known: OrderedDict[str, _Session] = OrderedDict()

    def is_free(self, name: str) -> bool:
        return name not in self._known or self._known[name].n_users == 0

    @asynccontextmanager
    async def held(self, name: str) -> AsyncIterator[None]:
        session = self._known.setdefault(name, _Session())
        self._known.move_to_end(name)
        session.n_users += 1
        try:
            async with session.lock:
                yield
        finally:
            session.n_users -= 1
            await self._give_up_oldest()

    async def _give_up_oldest(self) -> None:
        idle = [name for name, session in self._known.items() if session.n_users == 0]
        for name in idle[: max(0, len(idle) - self._most)]:
            del self._known[name]
            await self._engine.release(name)
