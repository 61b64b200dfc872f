"""A dry run lists everything that keeps a configuration from training, at once."""

from __future__ import annotations

import io
import shlex
import socket
from pathlib import Path

import pytest
from tests.fakes.recipes import FLEET_8B, RUN_GSM8K
from tests.fakes.small_runs import small_config

from skyfleet.config.loading import load_config
from skyfleet.tasks.loading import write_tasks
from skyfleet.tasks.task import Task
from skyfleet.trainer import preflight
from skyfleet.trainer.dry_run import plan_dry_run


def test_a_plan_without_problems_says_what_would_run(tmp_path: Path) -> None:
    plan = plan_dry_run(small_config(tmp_path / "run"))
    assert plan.problems == []
    *steps, memory = plan.steps
    assert memory.startswith("the run needs ")
    assert steps == [
        "would train tiny on 4 tasks (4 github):",
        "3 warm-start steps, then 3 steps of 2 x 4 = 8 episodes",
        "evaluating unseen on 3 tasks",
        "evaluating elsewhere on 2 tasks",
    ]
    assert not (tmp_path / "run").exists()


def test_every_problem_is_listed_beside_every_warning(tmp_path: Path) -> None:
    config = small_config(
        tmp_path,
        "trainer.strategy=megatron",
        "trainer.algorithm.gamma=0.9",
        "trainer.policy.model.path=./nowhere",
        "trainer.algorithm.advantage_estimator=no_such:estimator",
        "trainer.algorithm.policy_loss_type=no_such:loss",
        "trainer.sentinels.modes.moon=warn",
        "environment.env_class=no_such:play",
        "trainer.train_batch_size=40",
        "trainer.policy_mini_batch_size=40",
        "data.val_data={gone: [gone.parquet]}",
    )
    plan = plan_dry_run(config)
    for part in (
        "trainer.strategy='megatron' does not run",
        "trainer.policy.model.path='./nowhere' is not a model folder",
        "trainer.algorithm.advantage_estimator='no_such:estimator' cannot be imported",
        "trainer.algorithm.policy_loss_type='no_such:loss' cannot be imported",
        "trainer.sentinels.modes.moon is not a sentinel",
        "environment.env_class='no_such:play' cannot be imported",
        "trainer.train_batch_size=40 needs 40 different tasks, but there are 4",
        "gone.parquet: no such file",
    ):
        assert [part in problem for problem in plan.problems].count(True) == 1, part
    assert len(plan.problems) == 8


@pytest.mark.parametrize("script", [RUN_GSM8K, FLEET_8B])
def test_what_a_published_script_lacks_fits_one_screen(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLEET_API_KEY", raising=False)
    monkeypatch.setattr(preflight, "check_vllm", _raise_missing)
    plan = plan_dry_run(load_config("", shlex.split(script)))
    problems = "\n".join(plan.problems)
    assert "vllm is not installed" in problems
    assert "train.parquet: no such file" in problems
    assert "validation.parquet: no such file" in problems
    assert ("set FLEET_API_KEY" in problems) == (script == FLEET_8B)
    assert len(plan.steps) + len(plan.warnings) + len(plan.problems) < 24


def test_an_environment_class_of_a_row_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    write_tasks(file, [Task(key="g", env_key="g", prompt="1+1?", env_class="gms8k")])
    plan = plan_dry_run(small_config(tmp_path / "run", f"data.train_data=[{file}]"))
    assert any("env_class of task g='gms8k' is unknown" in line for line in plan.problems)


def _raise_missing() -> None:
    from skyfleet.errors import MissingExtraError

    raise MissingExtraError("vllm", "train,vllm", constrained=False)


def test_a_used_port_and_a_missing_wandb_key_are_found_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "MODALITY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        keys = (f"trainer.prometheus.port={port}", "trainer.logger=[wandb]")
        problems = plan_dry_run(small_config(tmp_path / "run", *keys)).problems
    assert any(f"trainer.prometheus.port={port} on 127.0.0.1: " in one for one in problems)
    assert any("trainer.logger has wandb, and WANDB_API_KEY is not set" in one for one in problems)
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password stored-key\n")
    assert not plan_dry_run(small_config(tmp_path / "run", keys[1])).problems
