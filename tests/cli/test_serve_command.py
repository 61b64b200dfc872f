"""`skyfleet serve` serves a model folder with the limits of the configuration."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import typer
from tests.fakes.tiny_policy import tiny_policy
from typer.testing import CliRunner

from skyfleet.checkpoints.checkpoint import JsonPart
from skyfleet.checkpoints.saving import save_checkpoint
from skyfleet.cli.agents import describe_agent, find_policy_folder, select_policy
from skyfleet.cli.serve import serve_command
from skyfleet.config.loading import load_config
from skyfleet.errors import ConfigError
from skyfleet.models.loading import LoadedModel, save_model
from skyfleet.tasks.sampling import TaskSampler
from skyfleet.tasks.task import Task

app = typer.Typer()
app.command()(serve_command)


def save_tiny_model(folder: Path) -> Path:
    policy_model = tiny_policy()
    save_model(
        LoadedModel(module=policy_model.decoder.module, tokenizer=policy_model.tokenizer), folder
    )
    return folder


def test_a_model_folder_is_served_with_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYFLEET_API_KEY", "k")
    config = load_config(
        "",
        [
            f"trainer.run_path={tmp_path / 'run'}",
            "trainer.device=cpu",
            "trainer.bf16=false",
            "trainer.max_prompt_length=300",
            "generator.max_input_length=300",
            "generator.sampling_params.max_generate_length=100",
            "generator.eval_sampling_params.max_generate_length=100",
            "generator.max_num_seqs=4",
        ],
    )
    model = save_tiny_model(tmp_path / "model")
    body = {"model": "mine", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    body["ignore_eos"] = True  # sampling has no seed, so a stop token could come first
    with (
        select_policy(config, model) as policy,
        policy.serve(port=0, name="mine") as server,
        httpx.Client(base_url=server.url) as client,
    ):
        assert describe_agent(policy) == str(model)
        assert client.post("/chat/completions", json=body).status_code == 401
        headers = {"Authorization": "Bearer k"}
        answer = client.post("/chat/completions", json=body, headers=headers)
        (shown,) = client.get("/models", headers=headers).json()["data"]
    assert answer.json()["usage"]["completion_tokens"] == 5
    assert (shown["id"], shown["max_model_len"]) == ("mine", 400)


def test_a_dry_run_prints_a_localhost_address() -> None:
    result = CliRunner().invoke(app, ["--dry-run", "--name", "mine"], catch_exceptions=False)
    assert result.exit_code == 0
    assert "# would serve mine at http://127.0.0.1:8000/v1" in result.output


def test_a_missing_checkpoint_is_a_config_error(tmp_path: Path) -> None:
    config = load_config("", [f"trainer.run_path={tmp_path}"])
    with pytest.raises(ConfigError, match="no such folder"):
        select_policy(config, tmp_path / "nothing")


def test_a_run_folder_is_its_newest_checkpoint_and_any_other_folder_is_refused(
    tmp_path: Path,
) -> None:
    config = load_config("", [f"trainer.run_path={tmp_path}"])
    with pytest.raises(ConfigError, match=r"holds no model; .* checkpoints/global_step_N"):
        find_policy_folder(config, tmp_path)
    sampler = TaskSampler([Task(key="1", env_key="e", prompt="p")], batch_size=1, seed=1)
    for step in (2, 10):
        save_checkpoint(tmp_path / "checkpoints", step, {"policy": JsonPart(sampler)})
    newest = tmp_path / "checkpoints" / "global_step_10" / "policy"
    assert find_policy_folder(config, tmp_path) == newest
