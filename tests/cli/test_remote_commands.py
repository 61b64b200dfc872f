"""`skyfleet evaluate` and `rollout` use the inference server that the configuration names."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import typer
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from tests.fakes.serving import serving
from tests.fakes.small_runs import SETTINGS, UNSEEN
from tests.fakes.tiny_policy import DIMENSIONS
from typer.testing import CliRunner

from skyfleet.cli.agents import select_policy
from skyfleet.cli.arguments import config_from
from skyfleet.cli.evaluate import evaluate_command
from skyfleet.cli.rollout import rollout_command
from skyfleet.cli.serve import serve_command
from skyfleet.cli.train import train_command
from skyfleet.errors import ConfigError
from skyfleet.models.loading import LoadedModel, save_model
from skyfleet.models.tiny import build_tiny, train_tokenizer
from skyfleet.trajectories.archive import eval_path, read_trajectories

app = typer.Typer()
app.command("evaluate")(evaluate_command)
app.command("rollout")(rollout_command)
app.command("serve")(serve_command)
app.command("train")(train_command)


def run_output(*args: str) -> str:
    result = CliRunner().invoke(app, list(args), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    tokenizer = train_tokenizer([], vocab_size=300)
    module = build_tiny(tokenizer, DIMENSIONS | {"max_position_embeddings": 16_012}, seed=0)
    save_model(LoadedModel(module=module, tokenizer=tokenizer), tmp_path / "model")
    file = tmp_path / "run.yaml"
    file.write_text(SETTINGS)
    return [
        str(file),
        f"trainer.run_path={tmp_path / 'run'}",
        f"trainer.policy.model.path={tmp_path / 'model'}",
        "trainer.policy.model_config_kwargs={}",
        "generator.max_input_length=16000",  # each letter is one token of this model
        "generator.max_turns=2",
    ]


def remote_args(url: str) -> list[str]:
    return ["generator.backend=openai", f"generator.remote_inference_engine_urls=[{url}]"]


@contextmanager
def serve_policy(settings: list[str], folder: Path, *, port: int = 0) -> Iterator[str]:
    """Serve the model in `folder` as "mine"; yields the URL without /v1."""
    with (
        select_policy(config_from(settings), folder) as policy,
        policy.serve(port=port, name="mine") as server,
    ):
        yield server.url.removesuffix("/v1")


def test_a_served_policy_is_evaluated_and_its_episodes_record_its_tokens(
    settings: list[str], tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    with serve_policy(settings, tmp_path / "model") as url:
        args = [*settings, *remote_args(url), "--eval-set", "unseen", "--output", str(kept)]
        shown = run_output("evaluate", *args)
        watched = run_output("rollout", UNSEEN, *settings, *remote_args(url))
    assert f"evaluated {url}" in shown
    assert watched.startswith(f"the model at {url}: github-")
    report = json.loads((kept / "reports/step_000000/unseen.json").read_text())
    assert report["played_by"]["endpoint"] == url
    assert report["played_by"]["model"] == "mine"
    attempts = list(read_trajectories(eval_path(kept / "trajectories", "unseen", 0)))
    assert [sum(a.transcripts[0].loss_mask) for a in attempts] == [24, 24, 24]  # two turns


def test_reports_and_transcripts_record_the_policys_step_and_a_folder_holds_one_step(
    settings: list[str], tmp_path: Path
) -> None:
    folders = [tmp_path / f"global_step_{step}" / "policy" for step in (3, 4)]
    for folder in folders:
        shutil.copytree(tmp_path / "model", folder)
    args = ["evaluate", *settings, "--eval-set", "unseen", "--output"]
    run_output(*args, str(tmp_path / "here"), "--checkpoint", str(folders[0]))
    there = str(tmp_path / "there")
    with serve_policy(settings, folders[0]) as url:
        run_output(*args, there, *remote_args(url))
    port = int(url.rpartition(":")[2])
    with (
        serve_policy(settings, folders[1], port=port) as url,
        pytest.raises(ConfigError, match=r"another agent \(step: 3 before, 4 after"),
    ):
        run_output(*args, there, *remote_args(url))
    for kept in ("here", "there"):
        attempts = read_trajectories(eval_path(tmp_path / kept / "trajectories", "unseen", 3))
        versions = {v for a in attempts for t in a.transcripts for v in t.policy_versions}
        report = json.loads((tmp_path / kept / "reports/step_000003/unseen.json").read_text())
        assert (report["step"], versions) == (3, {3})


async def test_a_server_without_token_ids_needs_the_endpoint_option(settings: list[str]) -> None:
    async def models(request: Request) -> JSONResponse:
        return JSONResponse({"data": [{"id": "theirs"}]})

    async def extract_text(request: Request) -> JSONResponse:
        return JSONResponse({"choices": [{"text": "hello"}]})

    theirs = Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/completions", extract_text, methods=["POST"]),
        ]
    )
    async with serving(theirs) as url:
        with pytest.raises(
            ConfigError, match=r"only be evaluated \(skyfleet evaluate --endpoint\)"
        ):
            await asyncio.to_thread(run_output, "rollout", UNSEEN, *settings, *remote_args(url))


def test_rollout_prints_the_checkpoint_it_uses(settings: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shown = run_output("rollout", UNSEEN, *settings, "--checkpoint", str(folder))
    assert shown.startswith(f"{folder}: github-")


def test_options_that_do_not_fit_a_server_are_refused(settings: list[str], tmp_path: Path) -> None:
    args = [*settings, *remote_args("127.0.0.1:9")]
    with pytest.raises(ConfigError, match="a server has its own weights; remove"):
        run_output("evaluate", *args, "--checkpoint", str(tmp_path / "model"))
    with pytest.raises(ConfigError, match="is a server already"):
        run_output("serve", *args)
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:9/v1 does not respond"):
        run_output("rollout", UNSEEN, *args)
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:9/v1 does not respond"):
        run_output("evaluate", *args, "--output", str(tmp_path / "kept"))
    assert not (tmp_path / "kept").exists()
    with pytest.raises(ConfigError, match=r"generator.backend='openai'"):
        run_output("train", *args, "--dry-run")
