"""Run generation requests on an engine: sessions, streaming in slices, metrics."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter

from skyfleet.chat.renderer import Renderer
from skyfleet.chat.transcript import Completion
from skyfleet.engines.engine import Engine
from skyfleet.engines.sampler import detect_finish
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.errors import MissingExtraError

try:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError:
    raise MissingExtraError("prometheus-client", "serve") from None

SLICE_TOKENS = 8
"""Tokens per chunk of a stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    prompt: list[int]
    sampling: SamplingParams
    session: str


class GenerationService:
    def __init__(self, engine: Engine, renderer: Renderer, *, max_idle_sessions: int) -> None:
        self._engine, self._renderer = engine, renderer
        self.sessions = Sessions(engine, max_idle=max_idle_sessions)
        self.metrics = ServerMetrics(engine)

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version

    async def generate(self, request: GenerateRequest) -> Completion:
        with self.metrics.measure_turn(len(request.prompt)):
            async with self.sessions.acquire(request.session):
                completion = await self._engine.generate(
                    request.prompt, request.sampling, session=request.session
                )
            self.metrics.generated_tokens += len(completion.token_ids)
        return completion

    async def stream(self, request: GenerateRequest) -> AsyncIterator[tuple[Completion, bool]]:
        """Yield slices of the completion, each with whether it is the last.

        The engine needs no support for streams. A seed samples other tokens than without streaming,
        because every slice starts at its own position.
        """
        sampled: list[int] = []
        is_last = False
        with self.metrics.measure_turn(len(request.prompt)):
            async with self.sessions.acquire(request.session):
                while not is_last:
                    left = request.sampling.max_generate_length - len(sampled)
                    sampling = replace(
                        request.sampling, max_generate_length=min(SLICE_TOKENS, left)
                    )
                    part = await self._engine.generate(
                        [*request.prompt, *sampled], sampling, session=request.session
                    )
                    part, is_last = self._append_slice(part, sampled, request.sampling)
                    self.metrics.generated_tokens += len(part.token_ids)
                    yield part, is_last

    def _append_slice(
        self, part: Completion, sampled: list[int], sampling: SamplingParams
    ) -> tuple[Completion, bool]:
        """Append the slice to `sampled`, up to the end of the turn.

        This also finds a stop string that began in an earlier slice, which the engine cannot see.
        """
        finish, n_before = None, len(sampled)
        for token in part.token_ids:
            sampled.append(token)
            finish = detect_finish(sampling, sampled, self._renderer.text)
            if finish is not None:
                break
        n = len(sampled) - n_before
        kept = replace(
            part,
            token_ids=part.token_ids[:n],
            logprobs=part.logprobs[:n],
            finish=finish or part.finish,
        )
        return kept, kept.finish != "length" or finish is not None


@dataclass(slots=True)
class _Session:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    n_users: int = 0


class Sessions:
    """The engine's sessions: one request at a time each, the least recently used released first."""

    def __init__(self, engine: Engine, *, max_idle: int) -> None:
        """`max_idle` sessions stay open without a request, so that they keep their KV cache."""
        self._engine, self._max_idle = engine, max_idle
        self._sessions: OrderedDict[str, _Session] = OrderedDict()

    def is_free(self, name: str) -> bool:
        return name not in self._sessions or self._sessions[name].n_users == 0

    @asynccontextmanager
    async def acquire(self, name: str) -> AsyncIterator[None]:
        session = self._sessions.setdefault(name, _Session())
        self._sessions.move_to_end(name)
        session.n_users += 1
        try:
            async with session.lock:
                yield
        finally:
            session.n_users -= 1
            await self._release_idle()

    async def _release_idle(self) -> None:
        idle = [name for name, session in self._sessions.items() if session.n_users == 0]
        for name in idle[: max(0, len(idle) - self._max_idle)]:
            del self._sessions[name]
            await self._engine.release(name)


class ServerMetrics(Collector):
    """What the server has done so far, in Prometheus' text format."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.requests: Counter[tuple[str, int]] = Counter()
        """By path and status; 499 is a client that disconnected."""
        self.turns_running = 0
        self.turns = 0
        self.turn_seconds = 0.0
        self.prompt_tokens = 0
        self.generated_tokens = 0

    @contextmanager
    def measure_turn(self, n_prompt_tokens: int) -> Iterator[None]:
        start = perf_counter()
        self.turns_running += 1
        self.prompt_tokens += n_prompt_tokens
        try:
            yield
        finally:
            self.turns_running -= 1
            self.turns += 1
            self.turn_seconds += perf_counter() - start

    def collect(self) -> Iterable[Metric]:
        requests = CounterMetricFamily(
            "skyfleet_requests", "Requests answered.", labels=["path", "status"]
        )
        for (path, status), count in sorted(self.requests.items()):
            requests.add_metric([path, str(status)], count)
        yield requests
        for name, meaning, total in (
            ("turns", "Turns that ended, including cancelled ones.", self.turns),
            ("turn_seconds", "Seconds spent in those turns.", self.turn_seconds),
            ("prompt_tokens", "Prompt tokens.", self.prompt_tokens),
            ("generated_tokens", "Sampled tokens.", self.generated_tokens),
        ):
            yield CounterMetricFamily(f"skyfleet_{name}", meaning, value=total)
        for name, meaning, value in (
            ("turns_running", "Turns in progress.", self.turns_running),
            ("policy_version", "Version of the served weights.", self._engine.policy_version),
        ):
            yield GaugeMetricFamily(f"skyfleet_{name}", meaning, value=value)

    def render(self) -> bytes:
        # A registry of its own: the default one adds metrics of the Python process.
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)
