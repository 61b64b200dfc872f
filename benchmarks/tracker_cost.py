"""The cost of watching a run, in milliseconds of CPU per step.

`python -m benchmarks.tracker_cost`, from the repository's root. A row of 200 metrics is committed to each
tracker, as the training loop does; W&B is offline; a step has no alert. Spans
are those of 192 episodes with three turns, as in a step of `tiny`. The first column is the time that the
training thread spends, the second that of the whole process, W&B's own process excluded. Medians.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from statistics import median
from time import process_time, sleep, thread_time

from skyfleet.tasks.task import Grade
from skyfleet.tracking.jsonl_tracker import JsonlTracker
from skyfleet.tracking.prometheus_tracker import PrometheusTracker
from skyfleet.tracking.step_log import StepLog
from skyfleet.tracking.tensorboard_tracker import TensorboardTracker
from skyfleet.tracking.tracing import EpisodeSpans, build_tracer
from skyfleet.tracking.tracker import Tracker
from skyfleet.tracking.wandb_tracker import WandbTracker
from skyfleet.trajectories.trajectory import Ending, Trajectory

ROW = {f"environment/world_{n % 20}/metric_{n}": n / 7 for n in range(200)}
N_STEPS, N_EPISODES, N_TURNS = 60, 192, 3
PAUSE_SECONDS = 0.2
"""Between two steps, in which the background threads work as they do during rollouts."""


def measure(step: Callable[[int], None]) -> tuple[float, float]:
    """Milliseconds per step: of the calling thread, and of the process."""
    own: list[float] = []
    process_started = process_time()
    for number in range(1, N_STEPS + 1):
        started = thread_time()
        step(number)
        own.append(thread_time() - started)
        sleep(PAUSE_SECONDS)
    return 1000 * median(own), 1000 * (process_time() - process_started) / N_STEPS


def measure_rows(make: Callable[[Path], Tracker]) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder:
        log = StepLog(make(Path(folder)))

        def commit(step: int) -> None:
            log.add(ROW)
            log.commit(step)

        result = measure(commit)
        log.close()
        return result


def measure_spans() -> tuple[float, float]:
    tracer = build_tracer("benchmark").bind(set="train", step=1)
    trajectory = Trajectory(
        task_key="task",
        env_key="github",
        sample=0,
        prompt=(),
        turns=(),
        transcripts=(),
        ending=Ending.DONE,
        grade=Grade(reward=1.0, success=True),
    )

    def step(_: int) -> None:
        for _ in range(N_EPISODES):
            spans = EpisodeSpans()
            spans.end_queue()
            for name, phase in (("environment", "open"), ("environment", "reset")):
                with spans.measure(name, phase):
                    pass
            for _ in range(N_TURNS):
                with spans.measure("engine", ""):
                    pass
                with spans.measure("environment", "step"):
                    pass
            with spans.measure("verifier", ""):
                pass
            tracer.export(spans, trajectory)

    result = measure(step)
    tracer.close()
    return result


class _Collector(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


def collect(ports: SimpleQueue[int]) -> None:
    """A collector of spans, in a process of its own."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Collector)
    ports.put(server.server_port)
    server.serve_forever()


def main() -> None:
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    ports: SimpleQueue[int] = SimpleQueue(ctx=get_context("spawn"))
    collector = get_context("spawn").Process(target=collect, args=(ports,), daemon=True)
    collector.start()
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{ports.get()}"
    trackers: dict[str, Callable[[Path], Tracker]] = {
        "jsonl (always)": lambda folder: JsonlTracker(folder, resume_step=None),
        "tensorboard": lambda folder: TensorboardTracker(folder, resume_step=None),
        "prometheus_client": lambda _: PrometheusTracker(run_name="r"),
        "wandb": lambda folder: WandbTracker(folder, project_name="p", run_name="r", config={}),
    }
    print("| | training thread, ms per step | process, ms per step |\n|---|---|---|")
    for name, make in trackers.items():
        if "jsonl" in name or find_spec(name):
            own, process = measure_rows(make)
            print(f"| {name} | {own:.2f} | {process:.2f} |", flush=True)
    if find_spec("opentelemetry.sdk"):
        own, process = measure_spans()
        print(f"| spans of {N_EPISODES} episodes | {own:.2f} | {process:.2f} |", flush=True)
    collector.kill()


if __name__ == "__main__":
    main()
