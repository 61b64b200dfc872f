"""A run reports itself: alerts, attached files and the Prometheus endpoint."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.fakes.alert_server import serve_alerts
from tests.fakes.small_runs import rows, small_config

from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError, MissingExtraError
from skyfleet.tasks.loading import write_tasks
from skyfleet.tracking.alerts import alert as alert_module
from skyfleet.tracking.tracing import EpisodeSpans, RolloutTracer
from skyfleet.tracking.wandb_file import read_records, read_wandb_file
from skyfleet.trainer.alerting import RunAlerts, build_alerts, check_watching
from skyfleet.trainer.assemble import GivenObjects
from skyfleet.trainer.callbacks import Callbacks, StepResult
from skyfleet.trainer.tasks import load_sources
from skyfleet.trainer.training_run import open_training_run, run_training
from skyfleet.trajectories.trajectory import Trajectory


def watched_config(folder: Path, url: str, *overrides: str) -> RunConfig:
    return small_config(
        folder / "run",
        "trainer.run_name=fleet_tool_use_0123abcd",
        "trainer.max_training_steps=2",
        "trainer.eval_interval=2",
        "trainer.ckpt_interval=1",
        "trainer.warm_start.steps=0",
        f"trainer.ckpt_path={folder / 'run' / 'checkpoints'}",
        f"trainer.alerts.webhook_url={url}/hook",
        "trainer.alerts.dollars_per_hour=36000",
        "trainer.logger=[tensorboard]",
        *overrides,
    )


async def test_a_run_that_fails_and_resumes_is_one_series_of_alerts(tmp_path: Path) -> None:
    def fail(step: StepResult) -> None:
        raise RuntimeError("password=hunter2hunter2 in a callback")

    with serve_alerts() as server:
        config = watched_config(tmp_path, server.url)
        failing = GivenObjects(callbacks=Callbacks(on_step=fail))
        with pytest.raises(RuntimeError, match="in a callback"):
            await run_training(config, given=failing)
        # On another machine there are the checkpoint and the reports, and no list of alerts.
        for part in ("checkpoints", "reports"):
            shutil.copytree(tmp_path / "run" / part, tmp_path / "new" / "run" / part)
        outcome = await run_training(watched_config(tmp_path / "new", server.url))
    posts = server.posts
    assert [(post["kind"], post["step"]) for post in posts] == [
        ("start", 0),
        ("evaluation", 0),
        ("failed", 1),
        ("start", 1),
        ("evaluation", 2),
        ("end", 2),
    ]
    start, scores, failed, resumed, verdicts, end = posts
    assert start["title"] == "fleet_tool_use_0123abcd started: 2 steps"
    assert "| unseen" in scores["text"]
    assert failed["title"] == "fleet_tool_use_0123abcd failed at step 1: RuntimeError"
    assert "hunter2" not in failed["text"]
    assert resumed["title"] == "fleet_tool_use_0123abcd resumed at step 1 of 2"
    assert "step 2: unseen: " in verdicts["title"]
    assert outcome.table is not None
    assert outcome.table.startswith(verdicts["text"].rstrip())
    hours, dollars = map(float, re.findall(r"([\d.]+) h, ([\d.]+) \$", end["title"])[0])
    assert dollars == pytest.approx(36000 * hours, abs=360)
    assert end["text"] == outcome.table
    attached = _read_texts(tmp_path / "new" / "run" / "tensorboard")
    assert {"run_config.yaml", "results.md"} <= attached


def _read_texts(folder: Path) -> set[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return set(events.Tags()["tensors"])


async def test_an_outage_of_every_receiver_leaves_the_run_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
    traced: list[object] = []
    export = RolloutTracer.export

    def count(tracer: RolloutTracer, spans: EpisodeSpans, trajectory: Trajectory) -> None:
        traced.append(tracer.attributes["skyfleet.set"])
        export(tracer, spans, trajectory)

    monkeypatch.setattr(RolloutTracer, "export", count)
    monkeypatch.setattr(alert_module, "FIRST_BACKOFF_SECONDS", 0.001)
    monkeypatch.setattr(alert_module, "DRAIN_SECONDS", 0.2)
    with serve_alerts() as server:
        pass
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    short = ("trainer.max_training_steps=1", "trainer.eval_interval=1")
    down = watched_config(tmp_path / "down", server.url, *short, "trainer.tracing=true")
    await run_training(down)
    alone = ("trainer.alerts.webhook_url=null", "trainer.logger=[console]")
    await run_training(watched_config(tmp_path / "alone", server.url, *short, *alone))
    assert rows(tmp_path / "down" / "run") == rows(tmp_path / "alone" / "run")
    # Two tasks with four attempts; and twice three tasks and two tasks.
    assert Counter(traced) == {"train": 8, "unseen": 6, "elsewhere": 4}
    assert not (tmp_path / "alone" / "run" / "webhook_alerts.json").exists()


async def test_a_warning_of_a_sentinel_is_one_alert_and_a_stop_another(tmp_path: Path) -> None:
    from skyfleet.errors import SentinelError

    with serve_alerts() as server:
        alerts = build_alerts(watched_config(tmp_path, server.url))
        (tmp_path / "run").mkdir()
        for step in (3, 4):
            alerts.report_warning("entropy_collapse", step, "entropy is 0.01 (before=1.2)")
        alerts.report_stop(SentinelError("sentinel gradient, step 5: it is zero"), 5)
        alerts.report_failing_upload("checkpoint 4", "PermissionError: AccessDenied")
        await alerts.close()
        alerts.finish()
        alerts.report_failing_upload("checkpoint 5", "of no interest any more")
    assert [(post["kind"], post["step"], post["text"]) for post in server.posts] == [
        ("sentinel", 3, "entropy is 0.01 (before=1.2)"),
        ("sentinel", 5, "sentinel gradient, step 5: it is zero"),
        (
            "upload",
            0,
            "PermissionError: AccessDenied\nIt stays on the machine's disk and is tried again "
            "every minute.",
        ),
    ]


async def test_without_a_slack_token_the_run_starts_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("SLACK_BOT_TOKEN", raising=False)
    config = small_config(tmp_path / "run", "trainer.alerts.slack_channel=runs")
    check_watching(config.trainer)
    alerts = build_alerts(config)
    alerts.report_start(0, 3)
    await alerts.close()
    assert [record.getMessage() for record in caplog.records] == [
        "trainer.alerts.slack_channel=runs: SLACK_BOT_TOKEN is not set, so nothing is posted to Slack"
    ]


def test_a_webhook_without_a_scheme_is_refused_before_the_run(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", "trainer.alerts.webhook_url=hooks.example/secret-path")
    with pytest.raises(ConfigError, match=r"webhook_url does not begin with http") as refused:
        check_watching(config.trainer)
    assert "secret-path" not in str(refused.value)


async def test_the_slack_thread_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("slack_sdk", reason="the extra slack is not installed")
    monkeypatch.setenv("SLACK_BOT_TOKEN", "xoxb-not-a-real-token")
    (tmp_path / "run").mkdir()
    with serve_alerts() as server:
        monkeypatch.setenv("SLACK_API_URL", f"{server.url}/api/")
        config = small_config(tmp_path / "run", "trainer.alerts.slack_channel=runs")
        alerts = build_alerts(config)
        alerts.report_start(0, 3)
        alerts.report_stop(KeyboardInterrupt(), 2)
        await alerts.close()
    assert [post["text"].partition("\n")[0] for post in server.posts] == [
        ":rocket: *test_run started: 3 steps*",
        ":x: *test_run was interrupted at step 2*",
    ]
    assert "xoxb" not in (tmp_path / "run" / "slack_alerts.json").read_text()


def test_alerts_without_a_receiver_do_nothing() -> None:
    alerts = RunAlerts()
    alerts.report_evaluation(0, ["missing"])
    alerts.report_end(1, 0, "")
    assert alerts.list_sent() == {}


def test_a_missing_package_names_its_extra_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLACK_BOT_TOKEN", "x")
    monkeypatch.setattr("skyfleet.trainer.alerting.find_spec", lambda _: None)
    for override, extra in (
        ("trainer.alerts.slack_channel=runs", "slack"),
        ("trainer.prometheus.port=9400", "prometheus"),
        ("trainer.tracing=true", "otel"),
    ):
        with pytest.raises(MissingExtraError, match=rf"\.\[{extra}\]"):
            check_watching(small_config(tmp_path / "run", override).trainer)


def test_the_last_row_is_served_while_the_run_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    from skyfleet.trainer.trackers import _serve_metrics

    (tracker,) = _serve_metrics(small_config(tmp_path / "run", "trainer.prometheus.port=0"))
    try:
        tracker.log({"reward/github/pass_at_4": 0.5}, 3)
        text = httpx.get(tracker.url).text
    finally:
        tracker.close()
    assert 'skyfleet_reward_pass_at_4{run="test_run",where="github"} 0.5' in text


@pytest.mark.parametrize(
    ("error", "state"),
    [(None, "finished"), (ValueError("a loss"), "failed"), (asyncio.CancelledError(), "killed")],
)
async def test_trackers_learn_how_the_run_ended(
    tmp_path: Path, error: BaseException | None, state: str
) -> None:
    states: list[str] = []
    with suppress(ValueError, asyncio.CancelledError):
        async with open_training_run(small_config(tmp_path / "run")) as run:
            run.log.finish = lambda state="finished": states.append(state)  # type: ignore[method-assign]
            if error is not None:
                raise error
    assert states[0] == state


@pytest.mark.exhaustive
async def test_a_resumed_run_is_one_wandb_group_with_its_inputs_and_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb", reason="the extra wandb is not installed")
    from wandb.proto import wandb_internal_pb2

    messages: Any = wandb_internal_pb2
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("GIT_COMMIT", "c0ffee")
    monkeypatch.chdir(tmp_path)  # outside a repository, as on a launched machine
    tasks = load_sources(["world:github?split=train&count=4"], key="SOURCE")
    write_tasks(tmp_path / "train.jsonl", tasks)
    (tmp_path / "manifest.json").write_text('{"version": "v7"}')
    wandb.teardown()
    for steps, channel in ((1, "one"), (2, "other")):  # where it is watched may change
        config = small_config(
            tmp_path / "run",
            "trainer.run_name=fleet_tool_use_0123abcd",
            f"data.train_data=[{tmp_path / 'train.jsonl'}]",
            "data.allow_unmanifested=true",
            f"trainer.max_training_steps={steps}",
            *("trainer.eval_interval=1", "trainer.warm_start.steps=0", "trainer.logger=[wandb]"),
            *(f"trainer.alerts.slack_channel={channel}", f"trainer.wandb.project={channel}"),
        )
        await run_training(config)
    wandb.teardown()  # waits for the process that writes the files
    paths = sorted((tmp_path / "run").glob("wandb/offline-run-*/run-*.wandb"))
    assert len(paths) == 2
    runs = [
        next(
            record.run
            for data in read_records(path)
            if (record := messages.Record.FromString(data)).WhichOneof("record_type") == "run"
        )
        for path in paths
    ]
    assert [(run.run_group, run.project) for run in runs] == [
        ("fleet_tool_use_0123abcd", "one"),
        ("fleet_tool_use_0123abcd", "other"),
    ]
    tracked = [read_wandb_file(path) for path in paths]
    assert [run.name for run in tracked] == ["fleet_tool_use_0123abcd"] * 2
    assert [run.config["resumed_at_step"] for run in tracked] == [None, 1]
    assert [run.config["code/commit"] for run in tracked] == ["c0ffee"] * 2
    assert [run.config["trainer.train_batch_size"] for run in tracked] == [2, 2]
    assert [[row["_step"] for row in run.rows] for run in tracked] == [[0, 1], [2]]
    for path in paths:
        files = path.parent / "files"
        assert (files / "dataset_manifest.json").read_text() == '{"version": "v7"}'
        names = {file.name for file in files.iterdir()}
        assert {"run_config.yaml", "results.md", "report.html"} <= names


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("trainer.prometheus.host=0.0.0.0", r"trainer\.prometheus\.host='0\.0\.0\.0' lets other"),
        ("trainer.prometheus.allowed_hosts=[a b]", "allowed_hosts 'a b' is not the name of a host"),
    ],
)
def test_an_endpoint_that_is_not_protected_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, sentence: str
) -> None:
    pytest.importorskip("prometheus_client")
    monkeypatch.delenv("SKYFLEET_API_KEY", raising=False)
    config = small_config(tmp_path / "run", "trainer.prometheus.port=0", override)
    with pytest.raises(ConfigError, match=sentence):
        check_watching(config.trainer)
