"""Preflight tries all that a run needs, names every fault at once, and passes a healthy run."""

from __future__ import annotations

import asyncio
import json
import threading
from base64 import b64decode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tests.fakes.serving import serving
from tests.fakes.small_runs import TRAIN, small_config
from tests.fakes.tiny_policy import DIMENSIONS
from typer.testing import CliRunner

from skyfleet.cli.main import app
from skyfleet.config.root import RunConfig
from skyfleet.config.trainer import Trainer
from skyfleet.curation.quarantine import Quarantine, write_quarantine
from skyfleet.curation.verdict import Reason, Verdict
from skyfleet.models.loading import LoadedModel, save_model
from skyfleet.models.tiny import build_tiny, train_tokenizer
from skyfleet.preflight import check as registry
from skyfleet.preflight.check import CheckFailedError, Group, Outcome, Subject, check
from skyfleet.preflight.keys import check_slack_token, check_wandb_key
from skyfleet.preflight.run import list_checks, run_preflight
from skyfleet.preflight.storage import check_bucket
from skyfleet.preflight.table import format_table
from skyfleet.tasks.loading import write_tasks
from skyfleet.tasks.task import Task
from skyfleet.worlds.catalog import tasks_from_source
from skyfleet.worlds.fleet_server.server import build_fleet_app

WRONG_KEY = "wrong-key-0123456789abcdef"
RIGHT_KEY = "right-key-0123456789abcdef"
ENVS = "tests.preflight.planted_envs:open_press"
LIMIT_SECONDS = 30


@asynccontextmanager
async def serve_services() -> AsyncIterator[str]:
    """W&B's and Slack's answers to one key each, and an engine that fails."""

    async def wandb(request: Request) -> Response:
        user = b64decode(request.headers["authorization"].removeprefix("Basic ")).decode()
        if user != f"api:{RIGHT_KEY}":
            return Response("no", 401)
        return JSONResponse({"data": {"viewer": {"entity": "team"}}})

    async def slack(request: Request) -> Response:
        ok = request.headers["authorization"] == f"Bearer {RIGHT_KEY}"
        return JSONResponse({"ok": ok, "team": "t"} if ok else {"ok": ok, "error": "invalid_auth"})

    async def engine(request: Request) -> Response:
        return Response("the engine is dead", 400)

    routes = [
        Route("/graphql", wandb, methods=["POST"]),
        Route("/auth.test", slack, methods=["POST"]),
        Route("/v1/{rest:path}", engine, methods=["GET", "POST"]),
    ]
    async with serving(Starlette(routes=routes)) as url:
        yield url


PLANTED = {
    "configuration": "trainer.strategy='megatron' does not run",
    "estimator and loss": "no_such:estimator' cannot be imported",
    "FLEET_API_KEY": "rejects FLEET_API_KEY (401); export a valid key",
    "WANDB_API_KEY": "rejects WANDB_API_KEY; export a valid key",
    "AWS credentials": "data.val_data.remote is in S3, and AWS_SECRET_ACCESS_KEY is not set",
    "versions": "httpx 0.1 is not >=0.28",
    "GPU and driver": "trainer.device=cuda and generator.backend=vllm need a GPU",
    "disk": "free some space",
    "run folders": "trainer.export_path=",
    "training tasks": "trainer.train_batch_size=40 needs 40 different tasks",
    "dataset manifest": "has no manifest.json beside it",
    "quarantine": "contains 1 tasks in quarantine",
    "evaluation tasks": "gone.parquet",
    "environment opened": "closed: EnvError: opening closed: OSError: the door is locked",
    "tool called": "hanging: no answer within",
    "graded": "ungraded: its grade is unknown (None); check its verifier",
    "token sampled": "/v1/models returned 400",
}
"""By check: what names the planted fault."""


async def test_every_planted_fault_is_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = build_fleet_app([], api_key=RIGHT_KEY)
    async with serving(fleet) as fleet_url, serve_services() as url:
        config = _plant_faults(tmp_path, monkeypatch, fleet_url=fleet_url, services_url=url)
        results = await asyncio.to_thread(run_preflight, config, timeout_seconds=LIMIT_SECONDS)
    found = {result.name: result for result in results}
    table = format_table(results)
    assert len(PLANTED) >= 15
    planted = dict(PLANTED)
    if "ckpt_bucket" in Trainer.model_fields:
        planted["trainer.ckpt_bucket"] = "cannot be written"
    for name, part in planted.items():
        assert found[name].outcome is Outcome.FAILED, table
        assert part in found[name].detail, table
    others = {name: one.outcome for name, one in found.items() if name not in planted}
    assert others == {
        "memory": Outcome.NOT_CHECKED,
        "model": Outcome.PASSED,
        "checkpoint written and read": Outcome.NOT_CHECKED,
    }, table
    assert f"{len(planted)} of {len(results)} checks failed" in table
    assert WRONG_KEY not in table


def _plant_faults(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, fleet_url: str, services_url: str
) -> RunConfig:
    for name, value in {
        "FLEET_BASE_URL": fleet_url,
        "FLEET_API_KEY": WRONG_KEY,
        "WANDB_BASE_URL": services_url,
        "WANDB_API_KEY": WRONG_KEY,
        "AWS_ACCESS_KEY_ID": WRONG_KEY,
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "WANDB_MODE", "MODALITY"):
        monkeypatch.delenv(name, raising=False)
    # An installed package of another version, first on the path.
    old = folder / "packages" / "httpx-0.1.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: httpx\nVersion: 0.1\n")
    monkeypatch.syspath_prepend(str(old.parent))
    tasks = [
        Task(key=f"{name}/1", env_key=name, prompt=f"press {name}")
        for name in ("closed", "hanging", "ungraded", "fleet")
    ]
    write_tasks(folder / "rows.jsonl", tasks)
    bad = Quarantine().updated([Verdict.on(tasks[0], (Reason.VACUOUS, "reward 1"))])
    write_quarantine(folder / "quarantine.jsonl", bad)
    file = folder / "a_file"
    file.write_text("not a folder")
    bucket = [f"trainer.ckpt_bucket={file}/b"] if "ckpt_bucket" in Trainer.model_fields else []
    return small_config(
        folder / "run",
        "trainer.strategy=megatron",
        "trainer.algorithm.advantage_estimator=no_such:estimator",
        "trainer.logger=[wandb]",
        "trainer.device=cuda",
        f"trainer.policy.model.path={_save_model(folder / 'model')}",
        "trainer.policy.model_config_kwargs={vocab_size: 1000000000000}",
        f"trainer.export_path={file}/exports",
        "trainer.train_batch_size=40",
        "trainer.policy_mini_batch_size=40",
        f"data.train_data=[{folder}/rows.jsonl]",
        f"data.val_data={{gone: [{folder}/gone.parquet], remote: ['s3://bucket/x.parquet']}}",
        "environment.env_classes="
        + json.dumps({"closed": ENVS, "hanging": ENVS, "ungraded": ENVS, "fleet": "fleet_task"}),
        "generator.backend=vllm",
        "generator.run_engines_locally=false",
        f"generator.remote_inference_engine_urls=['{services_url}/v1']",
        *bucket,
    )


def _save_model(folder: Path) -> Path:
    tokenizer = train_tokenizer([], vocab_size=300)
    module = build_tiny(tokenizer, DIMENSIONS, seed=0)
    save_model(LoadedModel(module=module, tokenizer=tokenizer), folder)
    return folder


def test_a_healthy_configuration_passes_and_leaves_nothing_behind(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", "trainer.max_ckpts_to_keep=2")
    results = run_preflight(config)
    table = format_table(results)
    assert {result.outcome for result in results} == {Outcome.PASSED}, table
    names = {result.name for result in results}
    assert {"tool called", "graded", "token sampled", "checkpoint written and read"} <= names
    assert names.isdisjoint({"FLEET_API_KEY", "WANDB_API_KEY", "SLACK_BOT_TOKEN", "GPU and driver"})
    assert list(tmp_path.iterdir()) == []


async def test_a_fleet_server_that_accepts_the_key_plays_and_grades_a_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path / "run", "environment.env_class=fleet_task")
    fleet = build_fleet_app(tasks_from_source(TRAIN), api_key=RIGHT_KEY)
    async with serving(fleet) as url:
        monkeypatch.setenv("FLEET_BASE_URL", url)
        monkeypatch.setenv("FLEET_API_KEY", RIGHT_KEY)
        others: list[Group] = ["configuration", "machine", "storage", "data", "policy"]
        results = await asyncio.to_thread(run_preflight, config, skip=others)
    assert [(one.name, one.outcome) for one in results] == [
        (name, Outcome.PASSED)
        for name in ("FLEET_API_KEY", "environment opened", "tool called", "graded")
    ], format_table(results)
    assert fleet.state.instances.created == fleet.state.instances.deleted == 1


def test_a_check_that_hangs_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    list_checks()
    monkeypatch.setattr(registry, "CHECKS", registry.CHECKS.copy())
    monkeypatch.setattr("skyfleet.preflight.run.CHECKS", registry.CHECKS)
    registry.CHECKS.clear()
    never = threading.Event()
    check("stuck", "keys", timeout_seconds=0.1)(lambda _: str(never.wait()))
    check("broken", "keys")(lambda _: str(1 / 0))
    check("fine", "keys")(lambda _: "found")
    check("not needed", "keys")(lambda _: None)
    results = run_preflight(small_config(tmp_path))
    never.set()
    assert [(one.name, one.outcome, one.is_stuck) for one in results] == [
        ("stuck", Outcome.FAILED, True),
        ("broken", Outcome.FAILED, False),
        ("fine", Outcome.PASSED, False),
    ]
    assert "no answer within 0.1 s" in results[0].detail


def test_rows_that_depend_on_a_fault_are_not_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLEET_API_KEY", raising=False)
    config = small_config(tmp_path, "environment.env_class=fleet_task")
    results = run_preflight(config, skip=["configuration", "machine", "storage", "data", "policy"])
    found = {result.name: result for result in results}
    assert "set FLEET_API_KEY" in found["FLEET_API_KEY"].detail
    assert found["environment opened"].outcome is Outcome.FAILED
    assert {found[name].outcome for name in ("tool called", "graded")} == {Outcome.NOT_CHECKED}


async def test_valid_keys_are_accepted_by_their_services(tmp_path: Path) -> None:
    alerts = SimpleNamespace(slack_channel="runs")
    config: Any = SimpleNamespace(
        trainer=SimpleNamespace(
            logger=["wandb"], alerts=alerts, wandb=SimpleNamespace(modality="both")
        )
    )
    async with serve_services() as url:
        for key, accepted in ((RIGHT_KEY, True), (WRONG_KEY, False)):
            environ = {
                "WANDB_BASE_URL": url,
                "WANDB_API_KEY_TOOL_USE": key,
                "MODALITY": "both",
                "SLACK_API_URL": url,
                "SLACK_BOT_TOKEN": key,
            }
            for function in (check_wandb_key, check_slack_token):
                calling = asyncio.to_thread(function, Subject(config, environ))
                if accepted:
                    assert "accepted" in str(await calling)
                else:
                    with pytest.raises(CheckFailedError, match=r"rejects .*; export a valid"):
                        await calling
    with pytest.raises(CheckFailedError, match="SLACK_BOT_TOKEN is not set"):
        check_slack_token(Subject(config, {}))


def test_an_outage_of_what_only_watches_a_run_does_not_end_it_when_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "WANDB_BASE_URL": "http://127.0.0.1:1",
        "WANDB_API_KEY": RIGHT_KEY,
        "FLEET_BASE_URL": "http://127.0.0.1:1",
        "FLEET_API_KEY": RIGHT_KEY,
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    skip = "configuration,machine,storage,data,environment,policy"
    arguments = [f"trainer.run_path={tmp_path}/run", "trainer.logger=[wandb]", "--skip", skip]
    fleet = "environment.env_class=fleet_task"
    first = CliRunner().invoke(app, ["preflight", *arguments])
    assert (first.exit_code, "FAILED       WANDB_API_KEY" in first.output) == (75, True), (
        first.output
    )
    (tmp_path / "run" / "journal").mkdir(parents=True)
    (tmp_path / "run" / "journal" / "step_1.jsonl").touch()
    again = CliRunner().invoke(app, ["preflight", *arguments])
    assert (again.exit_code, "warning      WANDB_API_KEY" in again.output) == (0, True), (
        again.output
    )
    needed = CliRunner().invoke(app, ["preflight", *arguments, fleet])
    assert (needed.exit_code, "FAILED       FLEET_API_KEY" in needed.output) == (75, True)
    monkeypatch.delenv("FLEET_API_KEY")
    assert CliRunner().invoke(app, ["preflight", *arguments, fleet]).exit_code == 1


def test_one_environment_out_of_order_is_a_warning_when_a_run_goes_on(tmp_path: Path) -> None:
    tasks = [Task(key=key, env_key=key, prompt="p") for key in ("closed", "open")]
    write_tasks(tmp_path / "tasks.jsonl", tasks)
    config = small_config(
        tmp_path / "run",
        f"data.train_data=[{tmp_path}/tasks.jsonl]",
        f"environment.env_classes={json.dumps({'closed': ENVS, 'open': ENVS})}",
    )
    others: list[Group] = ["configuration", "keys", "machine", "storage", "data", "policy"]

    def outcomes() -> list[Outcome]:
        return [one.outcome for one in run_preflight(config, skip=others)]

    assert outcomes()[0] is Outcome.FAILED
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "metrics.jsonl").touch()
    assert outcomes() == [Outcome.WARNING, Outcome.PASSED, Outcome.PASSED]


async def test_an_openenv_server_that_refuses_connections_is_named_in_time(tmp_path: Path) -> None:
    config = small_config(
        tmp_path / "run",
        "environment.env_class=openenv",
        "environment.openenv.base_url=http://127.0.0.1:1",
    )
    others: list[Group] = ["configuration", "keys", "machine", "storage", "data", "policy"]
    results = await asyncio.to_thread(run_preflight, config, skip=others, timeout_seconds=6)
    assert "127.0.0.1:1" in results[0].detail, results[0].detail
    assert "trajectory_timeout_seconds" not in results[0].detail


def test_a_bucket_without_credentials_is_a_warning_and_data_there_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    config = small_config(tmp_path / "run", "trainer.ckpt_bucket=skyrl-checkpoints")
    others: list[Group] = ["configuration", "machine", "data", "environment", "policy"]
    found = {one.name: one for one in run_preflight(config, skip=others)}
    assert found["AWS credentials"].outcome is Outcome.WARNING
    assert "nothing is uploaded to trainer.ckpt_bucket" in found["AWS credentials"].detail
    assert found["trainer.ckpt_bucket"].outcome is Outcome.NOT_CHECKED
    data = small_config(tmp_path / "run", "data.train_data=['s3://bucket/tasks.jsonl']")
    (found_data,) = run_preflight(data, skip=[*others, "storage"])
    assert found_data.outcome is Outcome.FAILED


def test_a_bucket_is_written_read_and_cleaned_up(tmp_path: Path) -> None:
    assert "cleaned up" in check_bucket(str(tmp_path / "bucket"), "trainer.ckpt_bucket")
    assert list((tmp_path / "bucket").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckFailedError, match=r"trainer.ckpt_bucket=.* cannot be written"):
        check_bucket(str(tmp_path / "file" / "bucket"), "trainer.ckpt_bucket")


def test_the_command_fails_with_the_table_and_skips_groups(tmp_path: Path) -> None:
    skip = "machine,storage,environment,policy"
    arguments = [f"trainer.run_path={tmp_path}", "data.train_data=[gone.parquet]", "--skip", skip]
    result = CliRunner().invoke(app, ["preflight", *arguments])
    assert result.exit_code == 1
    assert "FAILED       training tasks" in result.output
    assert "versions" not in result.output
    result = CliRunner().invoke(app, ["preflight", *arguments, "--skip", "moon"])
    assert "--skip moon is unknown" in str(result.exception)
