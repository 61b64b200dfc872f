"""Run generation requests on the engine: sessions, streaming slices and metrics."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from time import perf_counter

from skyfleet.engines.engine import Engine


class ServerMetrics:
    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        """By path and status; 499 is a client that went away."""
        self.turns_running = 0
        self.turns = 0
        self.turn_seconds = 0.0
        self.prompt_tokens = 0
        self.generated_tokens = 0

    @contextmanager
    def turn(self, n_prompt: int) -> Iterator[None]:
        start = perf_counter()
        self.turns_running += 1
        self.prompt_tokens += n_prompt
        try:
            yield
        finally:
            self.turns_running -= 1
            self.turns += 1
            self.turn_seconds += perf_counter() - start

    def text(self, policy_version: int) -> str:
        requests = [
            f'skyfleet_requests_total{{path="{path}",status="{status}"}} {count}'
            for (path, status), count in sorted(self.requests.items())
        ]
        numbers = (
            ("turns_total", "counter", "Turns that ended, also those broken off.", self.turns),
            ("turn_seconds_total", "counter", "Seconds those took.", f"{self.turn_seconds:.6f}"),
            ("turns_running", "gauge", "Turns under way.", self.turns_running),
            ("prompt_tokens_total", "counter", "Tokens of prompts.", self.prompt_tokens),
            ("generated_tokens_total", "counter", "Tokens sampled.", self.generated_tokens),
            ("policy_version", "gauge", "The weights that are served.", policy_version),
        )
        lines = [*_described("requests_total", "counter", "Requests answered."), *requests]
        for name, kind, meaning, number in numbers:
            lines += (*_described(name, kind, meaning), f"skyfleet_{name} {number}")
        return "\n".join([*lines, ""])


def _described(name: str, kind: str, meaning: str) -> tuple[str, str]:
    return f"# HELP skyfleet_{name} {meaning}", f"# TYPE skyfleet_{name} {kind}"


@dataclass(slots=True)
class _Session:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    n_users: int = 0


class Sessions:
    def __init__(self, engine: Engine, *, max_idle: int) -> None:
        """`most` are remembered while nobody uses them, so that they can go on from their cache."""
        self._engine, self._max_idle = engine, max_idle
        self._known: OrderedDict[str, _Session] = OrderedDict()

    def is_free(self, name: str) -> bool:
        return name not in self._known or self._known[name].n_users == 0

    @asynccontextmanager
    async def acquire(self, name: str) -> AsyncIterator[None]:
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
        for name in idle[: max(0, len(idle) - self._max_idle)]:
            del self._known[name]
            await self._engine.release(name)
