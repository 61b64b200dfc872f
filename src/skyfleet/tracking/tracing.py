"""RolloutTracer: OpenTelemetry spans of episodes: queue, engine, environment, verifier.

An episode measures its parts in an `EpisodeSpans`; the tracer exports them when it has ended. Without
a tracer an episode measures nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Thread
from time import monotonic, perf_counter_ns, time_ns
from typing import Any, NamedTuple

from skyfleet.errors import MissingExtraError
from skyfleet.trajectories.trajectory import Trajectory

FLUSH_SECONDS = 10.0
"""For the spans that are left at the end of a run."""

Attributes = Mapping[str, str | int | float | bool]


class Span(NamedTuple):
    name: str
    phase: str
    start_ns: int
    end_ns: int
    error: str


class EpisodeSpans:
    """The parts of one episode, from the moment it is queued."""

    __slots__ = ("spans", "start_ns")

    def __init__(self) -> None:
        self.start_ns = perf_counter_ns()
        self.spans: list[Span] = []

    def end_queue(self) -> None:
        self.spans.append(Span("queue", "", self.start_ns, perf_counter_ns(), ""))

    @contextmanager
    def measure(self, name: str, phase: str) -> Iterator[None]:
        start_ns, error = perf_counter_ns(), ""
        try:
            yield
        except BaseException as raised:
            error = type(raised).__name__
            raise
        finally:
            self.spans.append(Span(name, phase, start_ns, perf_counter_ns(), error))


class RolloutTracer:
    """Exports a span `rollout` per episode, with one child per part."""

    def __init__(self, provider: Any, processor: Any, attributes: Attributes | None = None) -> None:
        """`processor` is that of the provider."""
        from opentelemetry import trace
        from opentelemetry.sdk.trace import ReadableSpan

        self._provider, self._processor = provider, processor
        self._trace, self._readable_span = trace, ReadableSpan
        self._tracer = provider.get_tracer("skyfleet")
        self.attributes = dict(attributes or {})
        self._offset_ns = time_ns() - perf_counter_ns()
        self._unset = trace.Status(trace.StatusCode.UNSET)
        self._closing: Thread | None = None
        self._deadline = 0.0

    def bind(self, **attributes: str | int) -> RolloutTracer:
        """A tracer whose spans have these attributes too, such as the step."""
        named = {f"skyfleet.{name}": value for name, value in attributes.items()}
        return RolloutTracer(self._provider, self._processor, {**self.attributes, **named})

    def export(self, spans: EpisodeSpans, trajectory: Trajectory) -> None:
        end_ns = perf_counter_ns()
        root = self._tracer.start_span(
            "rollout",
            context=self._trace.set_span_in_context(self._trace.INVALID_SPAN),
            start_time=spans.start_ns + self._offset_ns,
            attributes={**self.attributes, **_describe(trajectory)},
        )
        if not root.is_recording():  # left out by OTEL_TRACES_SAMPLER
            return
        for part in spans.spans:
            self._processor.on_end(self._build_part(part, root))
        if trajectory.failure is not None:
            root.set_status(self._trace.StatusCode.ERROR, trajectory.failure.kind)
        root.end(end_ns + self._offset_ns)

    def _build_part(self, part: Span, root: Any) -> Any:
        """A child of `root`. Made as it ends, a span costs 2 µs; opened and ended by the SDK, 20 µs."""
        parent, trace = root.get_span_context(), self._trace
        return self._readable_span(
            part.name,
            context=trace.SpanContext(
                parent.trace_id,
                self._provider.id_generator.generate_span_id(),
                is_remote=False,
                trace_flags=parent.trace_flags,
            ),
            parent=parent,
            resource=self._provider.resource,
            attributes={"skyfleet.phase": part.phase} if part.phase else {},
            status=trace.Status(trace.StatusCode.ERROR, part.error) if part.error else self._unset,
            start_time=part.start_ns + self._offset_ns,
            end_time=part.end_ns + self._offset_ns,
            instrumentation_scope=root.instrumentation_scope,
        )

    def finish(self) -> None:
        """Start to export what is left; `close` waits for it."""
        if self._closing is None:
            # In a thread: the SDK's own timeouts do not end an export that is being retried.
            self._closing = Thread(target=self._provider.shutdown, daemon=True)
            self._closing.start()
            self._deadline = monotonic() + FLUSH_SECONDS

    def close(self) -> None:
        """Export what is left, for `FLUSH_SECONDS` at most."""
        self.finish()
        assert self._closing is not None
        self._closing.join(max(0.0, self._deadline - monotonic()))


def _describe(trajectory: Trajectory) -> dict[str, str | int | float | bool]:
    attributes: dict[str, str | int | float | bool] = {
        "skyfleet.task_key": trajectory.task_key,
        "skyfleet.env_key": trajectory.env_key,
        "skyfleet.sample": trajectory.sample,
        "skyfleet.turns": len(trajectory.turns),
        "skyfleet.ending": trajectory.ending.value,
    }
    if trajectory.grade is not None:  # an unknown grade has no reward, and not 0
        attributes["skyfleet.reward"] = trajectory.grade.reward
        attributes["skyfleet.success"] = trajectory.grade.success
    return attributes


class _FirstOnly(logging.Filter):
    """Lets each message of a logger through once: an outage would log one every five seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        is_first = record.msg not in self._seen
        self._seen.add(record.msg)
        return is_first


def build_tracer(run_name: str) -> RolloutTracer:
    """Export over OTLP and HTTP, as the variables OTEL_EXPORTER_OTLP_* say, in a thread of its own."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise MissingExtraError("opentelemetry-sdk", "otel") from None
    exporter_logger = logging.getLogger(OTLPSpanExporter.__module__)
    if not any(isinstance(each, _FirstOnly) for each in exporter_logger.filters):
        exporter_logger.addFilter(_FirstOnly())
    # Variables such as OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES are added by `create`.
    resource = Resource.create({"service.name": "skyfleet", "skyfleet.run": run_name})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    # Spans that do not fit into its queue of 2,048 are dropped; it never blocks the caller.
    processor = BatchSpanProcessor(OTLPSpanExporter())
    provider.add_span_processor(processor)
    return RolloutTracer(provider, processor)
