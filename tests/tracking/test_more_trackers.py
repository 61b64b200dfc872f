"""MLflow and trackio, each with its own client and a store on this machine."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from skyfleet.tracking.background import RunState
from skyfleet.tracking.mlflow_tracker import GROUP_TAG, MlflowTracker

ROWS = {1: {"reward/all": 0.25, "kl": float("nan")}, 2: {"reward/all": 0.5}}


def write_mlflow(
    folder: Path,
    *,
    resume_step: int | None = None,
    after_start: Callable[[], None] = lambda: None,
    state: RunState = "finished",
) -> None:
    config = {f"key{number}": number for number in range(250)}  # more than MLflow takes at once
    tracker = MlflowTracker(
        folder, project_name="p", run_name="r's", config=config, resume_step=resume_step
    )
    after_start()
    for step, metrics in ROWS.items():
        tracker.log(metrics, step)
    tracker.attach("report.html", "<p>report</p>")
    tracker.finish(state)
    tracker.close()


@pytest.mark.filterwarnings("ignore")
def test_mlflow_stores_rows_config_and_files_and_groups_resumed_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    write_mlflow(tmp_path)
    write_mlflow(tmp_path, resume_step=1, state="failed")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("p")
    second, first = client.search_runs([experiment.experiment_id])
    assert first.info.run_name == second.info.run_name == "r's"
    assert (first.info.status, second.info.status) == ("FINISHED", "FAILED")
    assert second.data.tags["mlflow.parentRunId"] == first.info.run_id
    assert first.data.tags[GROUP_TAG] == second.data.tags[GROUP_TAG]
    assert len(first.data.params) == 250
    history = client.get_metric_history(first.info.run_id, "reward/all")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.25), (2, 0.5)]
    (file,) = (tmp_path / "mlflow").glob(f"{first.info.run_id}/artifacts/*")
    assert file.read_text() == "<p>report</p>"


@pytest.mark.filterwarnings("ignore")
def test_an_mlflow_server_that_fails_later_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    def fail(*_: object, **__: object) -> None:
        raise MlflowException("the server is gone")

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with caplog.at_level(logging.WARNING, logger="skyfleet"):
        write_mlflow(
            tmp_path, after_start=lambda: monkeypatch.setattr(MlflowClient, "log_batch", fail)
        )
    messages = [r.getMessage() for r in caplog.records if r.name.startswith("skyfleet")]
    assert messages == [
        "mlflow: not sent: the server is gone; the run goes on, further cases are not reported"
    ]


TRACKIO = """
from skyfleet.tracking.trackio_tracker import TrackioTracker
for resume_step in (None, 1):
    tracker = TrackioTracker(
        project_name="p", run_name="r", config={"lr": 1e-6}, resume_step=resume_step
    )
    for step in (1, 2):
        tracker.log({"reward/all": step / 4}, step)
    tracker.attach("results.md", "| a table |")
    tracker.close()
"""


def test_trackio_stores_rows_config_and_files_and_groups_resumed_runs(tmp_path: Path) -> None:
    pytest.importorskip("trackio", reason="the extra trackio is not installed")
    # In a process of its own: trackio reads its folder when it is imported.
    variables = {"TRACKIO_DIR": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    subprocess.run(
        [sys.executable, "-c", TRACKIO], env=os.environ | variables, check=True, capture_output=True
    )
    with sqlite3.connect(tmp_path / "p.db") as database:
        rows = database.execute("select run_id, run_name, step, metrics from metrics").fetchall()
        configs = database.execute("select config from configs").fetchall()
        files = database.execute("select name from artifacts").fetchall()
    database.close()
    assert [(name, step, json.loads(metrics)) for _, name, step, metrics in rows] == [
        ("r", step, {"reward/all": step / 4}) for step in (1, 2, 1, 2)
    ]
    assert len({run_id for run_id, *_ in rows}) == 2
    assert [json.loads(config)["_Group"] for (config,) in configs] == ["r", "r"]
    assert [json.loads(config)["resumed_at_step"] for (config,) in configs] == [None, 1]
    assert files == [("r-results.md",)]
