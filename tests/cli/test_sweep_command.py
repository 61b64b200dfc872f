"""`skyfleet sweep`: its plan, its exit code, and runs that are launched instead of trained here."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.sweeps.scripted_runs import LR, ONE_SET, ScriptedRunner, write_config
from typer.testing import CliRunner

from skyfleet.cli.sweep import sweep_command
from skyfleet.errors import ConfigError
from skyfleet.launch.plan import LaunchPlan
from skyfleet.launch.sky import LaunchError

app = typer.Typer()
app.command("sweep")(sweep_command)
SWEPT = ("small.yaml", f"{LR}=1e-2,1e-3", ONE_SET)


def run(*args: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, args, catch_exceptions=False)
    assert result.exit_code == exit_code, result.output
    return result.output


@pytest.fixture(autouse=True)
def _config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(tmp_path, monkeypatch)


def test_a_dry_run_lists_the_runs_and_their_cost_and_writes_nothing() -> None:
    output = run(*SWEPT, "--seeds", "2", "--dry-run")
    assert "| small-lr-1e-3-seed43 | lr=1e-3 |   43 |" in output
    assert "4 runs: 96 training and 36 evaluation episodes." in output
    assert not Path("runs").exists()


def test_a_sweep_starts_with_its_configuration() -> None:
    with pytest.raises(ConfigError, match="skyfleet sweep needs a configuration first, such as"):
        run(f"{LR}=1,2")
    with pytest.raises(ConfigError, match="--seeds 0: a sweep needs at least one seed"):
        run(*SWEPT, "--seeds", "0")
    with pytest.raises(ConfigError, match="--spot and --env are options of --launch; add it"):
        run(*SWEPT, "--spot")


def test_failed_runs_end_the_sweep_with_code_1_and_repeating_it_with_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = ScriptedRunner(passes=lambda _: 20, failing={"small-lr-1e-3-seed42"})
    monkeypatch.setattr("skyfleet.sweeps.local_process.LocalRunner", lambda **_: runner)
    output = run(*SWEPT, "--seeds", "1", exit_code=1)
    assert "small-lr-1e-3-seed42 failed: exit code 2: out of memory" in output
    assert "The page: runs/small-lr/sweep.html." in output
    runner.failing.clear()
    output = run(*SWEPT, "--seeds", "1", "--baseline", "0.001")
    assert "run 2 of 2, small-lr-1e-2-seed42: finished earlier" in output
    assert "| val | lr=1e-2 | lr=1e-3  |" in output


def test_an_interrupted_sweep_says_how_to_continue_and_writes_its_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = ScriptedRunner(passes=lambda _: 20, interrupted={"small-lr-1e-3-seed42"})
    monkeypatch.setattr("skyfleet.sweeps.local_process.LocalRunner", lambda **_: runner)
    output = run(*SWEPT, "--seeds", "1", exit_code=130)
    assert "Interrupted. To continue: " in output
    assert "1 of 2 runs finished" in Path("runs/small-lr/sweep.html").read_text()


def make_clone(folder: Path) -> None:
    """What `skyfleet launch` accepts as a clone of skyfleet."""
    script = folder / "src/skyfleet/launch/scripts/run.sh"
    script.parent.mkdir(parents=True)
    script.touch()
    (folder / "constraints.txt").touch()
    shutil.copy(Path(__file__).parents[2] / "pyproject.toml", folder)
    (folder / ".gitignore").write_text("runs/\n")
    git = ("git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b.c")
    for arguments in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "Start")):
        subprocess.run([*git, *arguments], check=True)


def test_launched_runs_have_the_names_and_settings_of_the_sweep_and_are_read_back_from_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_clone(tmp_path)
    launched: dict[str, LaunchPlan] = {}

    def launch(plan: LaunchPlan, **_: Any) -> None:
        if plan.run_name.endswith("1e-3-seed42"):
            raise LaunchError("no machine for it; add clouds with --cloud")
        launched[plan.run_name] = plan

    monkeypatch.setattr("skyfleet.cli.sweep.launch_plan", launch)
    output = run(*SWEPT, "--seeds", "1", "--launch", "--gpus", "H100:1", "--dry-run")
    assert "would launch small-lr-1e-2-seed42: small.yaml on H100:1" in output
    assert not launched
    fleet = ("fleet_tool_use", f"{LR}=1e-6,2e-6", "--seeds", "1", "--launch", "--dry-run")
    output = run(*fleet)
    assert "2 runs: their episodes are not known here, where the data is not." in output
    launch_options = ("--launch", "--gpus", "H100:1", "--env", "DATA_VERSION=v0.3")
    output = run(*SWEPT, "--seeds", "1", *launch_options, exit_code=1)
    assert "small-lr-1e-3-seed42 failed: no machine for it" in output
    assert "1 run launched (skyfleet runs list)" in output
    (plan,) = launched.values()
    assert "RUN_NAME: small-lr-1e-2-seed42" in plan.text
    assert f"{LR}=1e-2" in plan.text
    assert "trainer.seed=42" in plan.text
    assert "DATA_VERSION: v0.3" in plan.text
    assert "trainer.run_path" not in plan.text, "the machine has its own folders"
    runner = ScriptedRunner(passes=lambda _: 20)
    monkeypatch.setattr("skyfleet.sweeps.local_process.LocalRunner", lambda **_: runner)
    run(*SWEPT, "--seeds", "1")
    assert runner.started == ["small-lr-1e-3-seed42"], "the launched one is not trained here"
