"""SimulatedEngine: an inference engine with continuous batching, in virtual time.

All running sequences decode at the pace of the batch. A prompt is prefilled in between, which stops
the others, as with a budget of tokens per forward pass. A sequence waits while the batch or the KV
cache is full.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf, sqrt
from typing import Protocol


class EngineCosts(Protocol):
    """What an engine takes, in seconds."""

    @property
    def max_running(self) -> int:
        """Sequences of one batch."""
        ...

    @property
    def kv_tokens(self) -> float:
        """Tokens that fit into the KV cache."""
        ...

    @property
    def context_seconds(self) -> float:
        """What every token of context adds to a decoding step."""
        ...

    def step_seconds(self, n_running: int) -> float:
        """A decoding step without the context of its sequences."""
        ...

    def prefill_seconds(self, n_new: int, n_before: int) -> float:
        """`n_new` tokens behind `n_before` that are cached."""
        ...


@dataclass(slots=True, eq=False)
class _Sequence:
    n_new: int
    n_cached: int
    n_sampled: int
    done: asyncio.Future[None]

    @property
    def n_tokens(self) -> int:
        return self.n_new + self.n_cached + self.n_sampled


class SimulatedEngine:
    def __init__(self, costs: EngineCosts) -> None:
        self._costs = costs
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[_Sequence] = deque()
        self._running: list[tuple[float, int, _Sequence]] = []
        """A heap by the number of tokens at which each one ends."""
        self._n_admitted = 0
        self._decoded = 0.0
        """Tokens that a sequence would have that ran from the start."""
        self._context = 0.0
        """Of all running sequences, in tokens."""
        self._reserved = 0
        """Tokens that the running sequences will have at their end."""
        self._last = self.busy_until = self._loop.time()
        """Until `busy_until` no sequence decodes: a prefill, new weights, other work of its thread."""
        self._slowdown = 1.0
        self._timer: asyncio.TimerHandle | None = None
        self.open_tokens = 0
        """Of all sessions on this engine, also those that wait for their environment."""
        self.n_sessions = 0
        self.busy_seconds = 0.0

    async def generate(self, *, n_new: int, n_cached: int, n_sampled: int) -> None:
        """One turn: returns when its last token is sampled."""
        self._advance()
        # What sessions hold beyond the cache is evicted, and prefilled again on average.
        kept = int(n_cached * min(1.0, self._costs.kv_tokens / max(1, self.open_tokens)))
        sequence = _Sequence(
            n_new=n_new + n_cached - kept,
            n_cached=kept,
            n_sampled=n_sampled,
            done=self._loop.create_future(),
        )
        self._waiting.append(sequence)
        self._admit()
        self._schedule()
        await sequence.done

    def block(self, seconds: float) -> float:
        """No sequence decodes for so long, after what already keeps the engine; returns when it ends."""
        self._advance()
        self.busy_until = max(self.busy_until, self._loop.time()) + seconds * self._slowdown
        self._schedule()
        return self.busy_until

    @property
    def is_busy(self) -> bool:
        return bool(self._running) or self.busy_until > self._loop.time()

    def recompute_running(self) -> None:
        """New weights make the cache of running sequences useless: they are prefilled again."""
        self._advance()
        for end, _, sequence in self._running:
            n_tokens = sequence.n_tokens - max(0, round(end - self._decoded))
            self._prefill(n_tokens, 0)
        self._schedule()

    def set_slowdown(self, factor: float) -> None:
        """From now on everything takes `factor` times as long, because others use the machine."""
        self._advance()
        self._slowdown = factor
        self._schedule()

    def count_busy_seconds(self) -> float:
        """Up to now, with prefill and what blocked it."""
        self._advance()
        return self.busy_seconds

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._costs.max_running:
            sequence = self._waiting[0]
            if self._running and self._reserved + sequence.n_tokens > self._costs.kv_tokens:
                return
            self._waiting.popleft()
            self._prefill(sequence.n_new, sequence.n_cached)
            # The prefill's own forward pass samples the first token.
            self._n_admitted += 1
            end = self._decoded + sequence.n_sampled - 1
            heappush(self._running, (end, self._n_admitted, sequence))
            self._context += sequence.n_new + sequence.n_cached + 1
            self._reserved += sequence.n_tokens

    def _prefill(self, n_new: int, n_before: int) -> None:
        seconds = self._costs.prefill_seconds(n_new, n_before) * self._slowdown
        self.busy_until = max(self.busy_until, self._loop.time()) + seconds

    def _advance(self) -> None:
        """Bring the state up to now."""
        now, last = self._loop.time(), self._last
        begin = min(max(last, self.busy_until), now)
        self.busy_seconds += begin - last
        if self._running and now > begin:
            n_tokens = min(self._count_tokens(now - begin), self._running[0][0] - self._decoded)
            self._decoded += n_tokens
            self._context += n_tokens * len(self._running)
            self.busy_seconds += now - begin
        self._last = now

    def _schedule(self) -> None:
        """Wake up when the next sequence ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running:
            seconds = self._measure_tokens(self._running[0][0] - self._decoded)
            when = max(self._loop.time(), self.busy_until) + seconds
            self._timer = self._loop.call_at(when, self._end_sequences)

    def _end_sequences(self) -> None:
        # The timer rings when the next one ends: rounding must not leave a part of a token.
        end = self._running[0][0]
        self._advance()
        self._context += (end - self._decoded) * len(self._running)
        self._decoded = end
        while self._running and self._running[0][0] <= end + 1e-9:
            _, _, sequence = heappop(self._running)
            self._context -= sequence.n_tokens
            self._reserved -= sequence.n_tokens
            if not sequence.done.done():
                sequence.done.set_result(None)
        self._admit()
        self._schedule()

    def _pace(self) -> tuple[float, float]:
        """Seconds of the next step, and how much longer each one is than the one before."""
        n, per_token = len(self._running), self._costs.context_seconds
        seconds = self._costs.step_seconds(n) + per_token * self._context
        return seconds * self._slowdown, per_token * n * self._slowdown

    def _measure_tokens(self, n_tokens: float) -> float:
        """Seconds to decode so many tokens of every running sequence."""
        seconds, growth = self._pace()
        return max(0.0, n_tokens) * (seconds + growth * max(0.0, n_tokens) / 2)

    def _count_tokens(self, seconds: float) -> float:
        """The inverse of `_measure_tokens`."""
        first, growth = self._pace()
        if growth * seconds < 1e-12:
            return seconds / first if first else inf
        return (sqrt(first * first + 2 * growth * seconds) - first) / growth
