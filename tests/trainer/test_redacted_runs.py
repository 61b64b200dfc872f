"""A run with secrets everywhere leaves none of them in its folder, its output or its pages."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.analysis.viewer_run import viewing
from tests.fakes.alert_server import serve_alerts
from tests.fakes.small_runs import SETTINGS
from tests.trainer.canary_env import CANARY, VARIABLE

from skyfleet.analysis.run_folder import open_run
from skyfleet.cli.main import app
from skyfleet.config.loading import load_config, load_config_file
from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError
from skyfleet.tasks.loading import write_tasks
from skyfleet.tasks.task import Task
from skyfleet.terminal import RedactingFilter
from skyfleet.trainer.resuming import find_resume_checkpoint
from skyfleet.trainer.training_run import run_training
from skyfleet.trajectories.archive import read_trajectories
from skyfleet.trajectories.records import to_record

SECRETS = {
    "environment.mcp.url": "https://bot:{}@host/mcp?api_key={}",
    "environment.mcp.command": "['serve', '--password', '{}', '-p{}', 'TOKEN={}']",
    "environment.mcp.headers.Authorization": "Bearer {}",
    "environment.mcp.environment.TOKEN": "{}",
    "environment.openenv.base_url": "http://bot:{}@host",
    "environment.openenv.headers.Authorization": "Bearer {}",
    "environment.skyrl_gym.env_config.password": "{}",
    "environment.skyrl_gym.env_config.nested.api_key": "{}",
    "environment.skyrl_gym.fleet_task.api_key": "{}",
    "generator.weight_sync_dir": "s3://bucket/weights?X-Amz-Signature={}",
    "generator.delta_weight_sync.sync_dir": "s3://bucket/deltas?X-Amz-Signature={}",
}
VARIABLES = (
    *("OPENAI_API_KEY", "FLEET_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN"),
    *("SLACK_BOT_TOKEN", "WANDB_API_KEY_TOOL_USE"),
)


def make_overrides(folder: Path, *more: str) -> tuple[list[str], list[str]]:
    """The overrides of a run with a different secret in each place, and the secrets."""
    numbers = iter(range(100, 1000))
    secrets = [f"{CANARY}{next(numbers)}" for _ in VARIABLES]
    overrides = []
    for key, template in SECRETS.items():
        new = [f"{CANARY}{next(numbers)}" for _ in range(template.count("{}"))]
        overrides.append(f"{key}={template.format(*new)}")
        secrets += new
    tasks = [Task(key=key, env_key="github", prompt="Say a.") for key in ("leaks", "plain")]
    write_tasks(folder / "tasks.jsonl", tasks)
    overrides += [
        f"trainer.run_path={folder / 'run'}",
        f"data.train_data=[{folder / 'tasks.jsonl'}]",
        f"data.val_data={{val: [{folder / 'tasks.jsonl'}]}}",
        "data.held_out_envs=[]",
        "data.allow_unmanifested=true",
        "data.allow_overlap=true",
        "environment.env_class=tests.trainer.canary_env:open_leaking",
        "trainer.warm_start.steps=0",
        "trainer.max_training_steps=1",
        "trainer.eval_interval=1",
        "trainer.print_example_interval=1",
        "trainer.dump_training_trajectories=true",
        "trainer.sentinels.mode=warn",
        *more,
    ]
    return overrides, secrets


def read_everything(run: Path) -> Iterator[tuple[str, bytes]]:
    """Every file of the run folder; episodes are decompressed."""
    for path in sorted(run.rglob("*")):
        if path.is_file():
            yield str(path), path.read_bytes()
        if (path.is_file() and path.suffix == ".zst") or path.name.endswith(".jsonl.zst"):
            records = [to_record(each) for each in read_trajectories(path)]
            yield f"{path} unpacked", json.dumps(records).encode()


def read_pages(run: Path) -> Iterator[tuple[str, bytes]]:
    with viewing(run) as server, httpx.Client(base_url=server.url) as client:
        for path in ("/", "/api/run", "/api/episodes"):
            yield path, client.get(path).content
        for entry in open_run(run).entries():
            yield entry.id, client.get(f"/api/episode/{entry.id}").content


def assert_no_canary(texts: Iterator[tuple[str, bytes]]) -> int:
    found = dict(texts)
    leaks = {
        name: text[max(text.find(CANARY.encode()) - 80, 0) :][:200]
        for name, text in found.items()
        if CANARY.encode() in text
    }
    assert not leaks
    return len(found)


async def _train(
    overrides: list[str],
    secrets: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> RunConfig:
    for name, secret in zip(VARIABLES, secrets, strict=False):
        monkeypatch.setenv(name, secret)
    monkeypatch.setenv(VARIABLE, ",".join([*secrets, f"{CANARY}999"]))
    caplog.set_level(logging.INFO)
    caplog.handler.addFilter(RedactingFilter())
    config = load_config(SETTINGS, overrides)
    await run_training(config)
    return config


async def test_no_secret_is_in_the_run_folder_the_output_or_the_viewer(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
    with serve_alerts() as watching:
        overrides, secrets = make_overrides(
            tmp_path,
            "trainer.logger=[console,tensorboard]",
            f"trainer.alerts.webhook_url={watching.url}/services/{CANARY}999",
            "trainer.tracing=true",
        )
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", watching.url)
        config = await _train(overrides, secrets, monkeypatch, caplog)
    alerts = [post for post in watching.posts if "key" in post]
    assert [alert["kind"] for alert in alerts] == [
        *("start", "evaluation", "sentinel", "evaluation", "end")
    ]
    spans = b"".join(post["_raw"] for post in watching.posts if post["_path"] == "/v1/traces")
    assert b"skyfleet.task_key" in spans
    assert b"leaks" in spans
    bodies = b"".join(post["_raw"] for post in watching.posts)
    assert_no_canary(iter([("alerts and spans", bodies)]))
    run = tmp_path / "run"
    app(["log", str(run)], standalone_mode=False)
    app(["config", "diff", str(run / "config.yaml"), "tiny"], standalone_mode=False)
    app(["analyze", str(run)], standalone_mode=False)
    logged = "\n".join(map(logging.Formatter().format, caplog.records))
    assert "connecting with" in logged
    output = capfd.readouterr()
    texts = {"stdout": output.out, "stderr": output.err, "log": logged}
    assert_no_canary((name, text.encode()) for name, text in texts.items())
    assert assert_no_canary(read_everything(run)) > 8
    assert assert_no_canary(read_pages(run)) > 4
    # The same command resumes, also with a new password; the stored file alone does not.
    assert find_resume_checkpoint(config) is not None
    renewed = [override.replace(CANARY, "renewed000") for override in overrides]
    assert find_resume_checkpoint(load_config(SETTINGS, renewed)) is not None
    with pytest.raises(ConfigError, match=r"environment\.mcp\.url holds a redacted secret"):
        load_config_file(run / "config.yaml")
    moved = [override.replace("@host", "@elsewhere") for override in overrides]
    with pytest.raises(ConfigError, match=r"was started with environment\.\w+\.\w*url=") as refused:
        find_resume_checkpoint(load_config(SETTINGS, moved))
    assert CANARY not in str(refused.value)


@pytest.mark.exhaustive
def test_no_secret_is_in_the_files_of_wandb_or_the_output_of_the_command(tmp_path: Path) -> None:
    overrides, secrets = make_overrides(tmp_path, "trainer.logger=[console,wandb]")
    settings = tmp_path / "settings.yaml"
    settings.write_text(SETTINGS)
    variables = dict(zip(VARIABLES, secrets, strict=False)) | {
        VARIABLE: ",".join(secrets),
        "WANDB_MODE": "offline",
        "WANDB_API_KEY": f"{CANARY}{'f' * 26}",
    }
    done = subprocess.run(
        [sys.executable, "-m", "skyfleet.cli.main", "train", str(settings), *overrides],
        env=os.environ | variables,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    time.sleep(2)  # another process writes W&B's files
    assert b"connecting with" in done.stderr
    assert_no_canary(iter([("stdout", done.stdout), ("stderr", done.stderr)]))
    assert assert_no_canary(read_everything(tmp_path / "run")) > 10
    assert list((tmp_path / "run").glob("wandb/offline-run-*/run-*.wandb"))
