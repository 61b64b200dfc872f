"""Every episode is a trace: queue, environment, engine and verifier inside `rollout`."""

from __future__ import annotations

import logging
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from tests.fakes.counter_env import PRESS, TASK, CounterEnv, make_factory
from tests.fakes.scripted_engine import ScriptedEngine, token_agent

from skyfleet.chat.message import Message
from skyfleet.envs.env import Step
from skyfleet.rollouts.episode import Limits, collect
from skyfleet.tracking.tracing import RolloutTracer, build_tracer
from skyfleet.trajectories.trajectory import Group

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")

LIMITS = Limits(max_turns=8, max_input_length=1000, trajectory_timeout_seconds=5)


async def collect_one(env: CounterEnv, tracer: RolloutTracer | None, n_samples: int = 1) -> Group:
    engine = ScriptedEngine(*[PRESS % 1, PRESS % 2, "done"] * n_samples)
    (group,) = await collect(
        [TASK],
        make_factory(env),
        token_agent(engine),
        LIMITS,
        n_samples=n_samples,
        max_concurrent=1,
        tracer=tracer,
    )
    return group


@pytest.fixture
def traced() -> tuple[RolloutTracer, Any]:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    processor = SimpleSpanProcessor(exporter)
    provider.add_span_processor(processor)
    return RolloutTracer(provider, processor), exporter


async def test_an_episode_is_one_trace_with_a_span_per_part(
    traced: tuple[RolloutTracer, Any],
) -> None:
    tracer, exporter = traced
    await collect_one(CounterEnv(), tracer.bind(set="train", step=4))
    spans = exporter.get_finished_spans()
    (root,) = [span for span in spans if span.name == "rollout"]
    parts = [span for span in spans if span is not root]
    assert [(span.name, (span.attributes or {}).get("skyfleet.phase")) for span in parts] == [
        ("queue", None),
        ("environment", "open"),
        ("environment", "reset"),
        *[("engine", "generate"), ("environment", "step")] * 3,
        ("verifier", "grade"),
    ]
    assert all(span.parent.span_id == root.context.span_id for span in parts)
    ordered = [time for span in parts for time in (span.start_time, span.end_time)]
    assert ordered == sorted(ordered)
    assert root.start_time <= ordered[0]
    assert ordered[-1] <= root.end_time
    assert dict(root.attributes) == {
        "skyfleet.set": "train",
        "skyfleet.step": 4,
        "skyfleet.task_key": "t",
        "skyfleet.env_key": TASK.env_key,
        "skyfleet.sample": 0,
        "skyfleet.turns": 3,
        "skyfleet.ending": "done",
        "skyfleet.reward": 1.0,
        "skyfleet.success": True,
    }


async def test_attempts_are_separate_traces_and_wait_in_the_queue(
    traced: tuple[RolloutTracer, Any],
) -> None:
    tracer, exporter = traced
    await collect_one(CounterEnv(), tracer, n_samples=2)
    spans = exporter.get_finished_spans()
    assert len({span.context.trace_id for span in spans}) == 2
    first, second = [span for span in spans if span.name == "queue"]
    # With one episode at a time the second waits for the first.
    assert second.end_time - second.start_time > first.end_time - first.start_time


class FailingEnv(CounterEnv):
    async def step(self, action: Message) -> Step:
        raise ConnectionResetError("gone")


async def test_a_failed_part_has_the_status_error_and_no_reward(
    traced: tuple[RolloutTracer, Any],
) -> None:
    tracer, exporter = traced
    await collect_one(FailingEnv(), tracer)
    spans = exporter.get_finished_spans()
    failed = Counter(
        span.name for span in spans if not span.status.is_ok and span.status.description
    )
    assert failed == {"environment": 1, "rollout": 1}
    (root,) = [span for span in spans if span.name == "rollout"]
    assert "skyfleet.reward" not in root.attributes


async def test_tracing_does_not_change_an_episode(traced: tuple[RolloutTracer, Any]) -> None:
    with_spans = await collect_one(CounterEnv(), traced[0])
    without = await collect_one(CounterEnv(), None)
    for one, other in zip(with_spans.trajectories, without.trajectories, strict=True):
        assert (one.messages, one.transcripts, one.grade) == (
            other.messages,
            other.transcripts,
            other.grade,
        )


async def test_spans_are_posted_to_the_collector_in_otlp(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            bodies.append(body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    try:
        tracer = build_tracer("r")
        await collect_one(CounterEnv(), tracer)
        tracer.close()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    requests = [ExportTraceServiceRequest.FromString(body) for body in bodies]
    resources = [each for request in requests for each in request.resource_spans]
    names = {a.key: a.value.string_value for each in resources for a in each.resource.attributes}
    assert (names["service.name"], names["skyfleet.run"]) == ("skyfleet", "r")
    n_spans = sum(len(scope.spans) for each in resources for scope in each.scope_spans)
    assert n_spans == 11


async def test_a_collector_that_is_gone_does_not_fail_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    tracer = build_tracer("r")
    with caplog.at_level(logging.CRITICAL):
        group = await collect_one(CounterEnv(), tracer)
        tracer.close()
    assert group.n_passed == 1


async def test_the_sampler_of_opentelemetry_leaves_whole_episodes_out() -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)
    provider.add_span_processor(processor := SimpleSpanProcessor(exporter))
    await collect_one(CounterEnv(), RolloutTracer(provider, processor))
    assert exporter.get_finished_spans() == ()
