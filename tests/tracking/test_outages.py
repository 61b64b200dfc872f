"""An outage of a tracker, Slack, a webhook or a collector neither stops nor delays its caller."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.fakes.broken_server import FAULTS, serve_broken
from tests.fakes.wandb_server import serve_wandb

from skyfleet.errors import ConfigError
from skyfleet.tracking import background, mlflow_tracker
from skyfleet.tracking.alerts import alert as alert_module
from skyfleet.tracking.alerts.alert import Alert, AlertKind, AlertReceiver, AlertSender
from skyfleet.tracking.alerts.slack import SlackReceiver
from skyfleet.tracking.alerts.webhook import WebhookReceiver
from skyfleet.tracking.mlflow_tracker import MlflowTracker
from skyfleet.tracking.wandb_file import read_wandb_file
from skyfleet.tracking.wandb_tracker import WandbTracker

ALERTS = [Alert(kind=AlertKind.EVALUATION, key=f"evaluation/{n}", title=f"{n}") for n in range(3)]
TOKEN, HOOK, WANDB_KEY = "xoxb-canary-canary-0123456789", "T0/canary-canary-canary", "ca4a41" * 7
SECRETS = (TOKEN, HOOK, "canary-canary-canary", WANDB_KEY[:40])

Make = Callable[[str], AlertReceiver]


def slack(url: str) -> SlackReceiver:
    pytest.importorskip("slack_sdk", reason="the extra slack is not installed")
    return SlackReceiver("runs", token=TOKEN, base_url=f"{url}/api/")


def webhook(url: str) -> WebhookReceiver:
    return WebhookReceiver(f"{url}/hooks/{HOOK}", run_name="r", project_name="p")


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> Iterator[list[str]]:
    """The warnings so far. At the end no text and no file has a secret, though none is filtered."""
    caplog.set_level(logging.INFO)
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    keep = Keep(level=logging.WARNING)
    logging.getLogger("skyfleet").addHandler(keep)
    yield found
    logging.getLogger("skyfleet").removeHandler(keep)
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    for secret in SECRETS:
        assert not any(secret in message for message in found)
        assert not any(secret.encode() in data for data in files)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("make", [slack, webhook])
def test_alerts_delay_nobody_and_an_outage_is_one_warning_of_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str], make: Make, fault: str
) -> None:
    monkeypatch.setattr(alert_module, "FIRST_BACKOFF_SECONDS", 0.001)
    # A webhook's answer is its status.
    is_accepted = make is webhook and fault in ("invalid JSON", "closes mid-reply")
    with serve_broken(fault) as url:
        receiver = make(url)
        sender = AlertSender([receiver], tmp_path, drain_seconds=60.0 if is_accepted else 0.2)
        for alert in ALERTS:
            sender.send(alert)
        sender.close()
    sent = sender.list_sent()[receiver.name]["sent"]
    assert sent == ([alert.key for alert in ALERTS] if is_accepted else [])
    # Alerts wait, are given up, and the end has a deadline: each is logged once at most.
    kinds = ("tried again until the run ends", "at the end of the run are over", "not sent: ")
    logged = [next(kind for kind in kinds if kind in text) for text in warnings]
    assert len(logged) == len(set(logged))
    assert bool(logged) == (not is_accepted)


def start_wandb(folder: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> WandbTracker:
    monkeypatch.setenv("WANDB_BASE_URL", url)
    monkeypatch.setenv("WANDB_API_KEY", WANDB_KEY[:40])
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return WandbTracker(folder, project_name="p", run_name="r", config={"lr": 1e-6})


@pytest.fixture
def fresh_wandb() -> Iterator[None]:
    wandb = pytest.importorskip("wandb", reason="the extra wandb is not installed")
    wandb.teardown()
    yield
    wandb.teardown()


@pytest.mark.parametrize(
    "fault",
    [
        "hangs",
        *(pytest.param(f, marks=pytest.mark.exhaustive) for f in FAULTS if f != "hangs"),
    ],
)
@pytest.mark.usefixtures("fresh_wandb")
def test_a_run_that_starts_while_wandb_is_down_keeps_its_rows_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str], fault: str
) -> None:
    with serve_broken(fault) as url:
        tracker = start_wandb(tmp_path, url, monkeypatch)
        for step in (1, 2):
            tracker.log({"reward/all": step / 4}, step)
        tracker.close()
    sys.modules["wandb"].teardown()  # waits for the process that writes the file
    (message,) = warnings
    assert message.startswith("W&B does not answer: ")
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert f"`wandb sync {path.parent}`" in message
    assert [row["reward/all"] for row in read_wandb_file(path).rows] == [0.25, 0.5]


WANDB = """
import sys
from pathlib import Path
from skyfleet.tracking import background
from skyfleet.tracking.wandb_tracker import WandbTracker
background.DRAIN_SECONDS = 2.0
tracker = WandbTracker(Path(sys.argv[1]), project_name="p", run_name="r", config={"lr": 1e-6})
for step in range(1, 300):
    tracker.log({"reward/all": step / 4}, step)
tracker.attach("results.md", "| a |")
tracker.close()
print("the run goes on")
"""


def run_script(script: str, *arguments: str, **variables: str) -> str:
    """What it prints; it also has to end: a client may wait for its server in a hook at exit."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "the run goes on" in done.stdout
    output = done.stdout + done.stderr
    assert not any(secret in output for secret in SECRETS)
    return output


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", ["hangs", "500", "429", "invalid JSON", "closes mid-reply"])
def test_wandb_that_fails_during_a_run_is_left_behind_at_its_end(
    tmp_path: Path, fault: str
) -> None:
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    with serve_wandb(r=[{"_step": 0}], fault=fault) as url:
        run_script(
            WANDB,
            str(tmp_path),
            WANDB_BASE_URL=url,
            WANDB_API_KEY=WANDB_KEY[:40],
            WANDB_MODE="online",
        )
    (path,) = tmp_path.glob("wandb/run-*/run-*.wandb")
    assert [row["reward/all"] for row in read_wandb_file(path).rows] == [
        step / 4 for step in range(1, 300)
    ]


@pytest.mark.usefixtures("fresh_wandb")
@pytest.mark.exhaustive
def test_a_key_that_wandb_refuses_is_an_error_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        serve_wandb(r=[{"_step": 0}], fault="401") as url,
        pytest.raises(ConfigError, match=r"trainer\.logger='wandb': .*bad key"),
    ):
        start_wandb(tmp_path, url, monkeypatch)


def start_mlflow(folder: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> MlflowTracker:
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "canary-canary-canary")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.setattr(mlflow_tracker, "START_SECONDS", 0.2)
    monkeypatch.setattr(background, "DRAIN_SECONDS", 0.5)
    return MlflowTracker(folder, project_name="p", run_name="r", config={"lr": 1e-6})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fault", FAULTS)
def test_an_mlflow_server_that_is_down_never_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str], fault: str
) -> None:
    with serve_broken(fault) as url:
        tracker = start_mlflow(tmp_path, url, monkeypatch)
        for step in (1, 2):
            tracker.log({"reward/all": step / 4}, step)
        tracker.attach("results.md", "| a |")
        tracker.close()
    assert 1 <= len(warnings) <= 3  # one per kind of exception
    assert all(message.startswith("mlflow: not sent: ") for message in warnings)


@pytest.mark.filterwarnings("ignore")
def test_an_mlflow_server_that_refuses_is_an_error_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    monkeypatch.setattr(mlflow_tracker, "START_SECONDS", 60.0)
    with serve_broken("401") as url:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
        with pytest.raises(ConfigError, match=r"trainer\.logger='mlflow': .*401"):
            MlflowTracker(tmp_path, project_name="p", run_name="r", config={})


TRACKIO = """
from skyfleet.tracking import background
from skyfleet.tracking.trackio_tracker import TrackioTracker
background.DRAIN_SECONDS = 1.0
tracker = TrackioTracker(project_name="p", run_name="r", config={"lr": 1e-6})
for step in (1, 2):
    tracker.log({"reward/all": step / 4}, step)
tracker.attach("results.md", "| a |")
tracker.close()
print("the run goes on")
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", FAULTS)
def test_a_trackio_server_that_is_down_never_stops_the_run(tmp_path: Path, fault: str) -> None:
    pytest.importorskip("trackio", reason="the extra trackio is not installed")
    with serve_broken(fault) as url:
        run_script(
            TRACKIO,
            TRACKIO_DIR=str(tmp_path),
            TRACKIO_SERVER_URL=f"{url}/?write_token=canary-canary-canary",
            HF_HUB_OFFLINE="1",
        )


@pytest.mark.parametrize("fault", FAULTS)
def test_a_collector_of_spans_that_is_down_ends_with_the_deadline(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
    from skyfleet.tracking import tracing

    monkeypatch.setattr(tracing, "FLUSH_SECONDS", 0.2)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with serve_broken(fault) as url:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        tracer = tracing.build_tracer("r")
        for _ in range(100):
            tracer._tracer.start_span("rollout").end()
        tracer.close()
