"""The command line: every command starts fast, prints its plan with --dry-run, and runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.fakes.small_runs import SETTINGS
from typer.testing import CliRunner

from skyfleet.cli.main import app, main
from skyfleet.config.loading import load_config
from skyfleet.errors import CheckpointError, ConfigError
from skyfleet.tasks.loading import load_tasks

SOURCE = "world:github?split=train&count=3"
_SMOOTH = "trainer.algorithm.policy_loss_type=examples.add_a_loss.loss:smooth_clip"
SMALL_BATCH = ("trainer.train_batch_size=2", "trainer.policy_mini_batch_size=2")


def run(*args: str) -> str:
    result = CliRunner().invoke(app, args, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def settings(tmp_path: Path) -> str:
    file = tmp_path / "run.yaml"
    file.write_text(f"{SETTINGS}\n")
    return str(file)


def keys() -> list[str]:
    return [line.split()[0] for line in run("tasks", "list", SOURCE).splitlines()]


def test_the_command_line_imports_no_heavy_package() -> None:
    code = "import sys, skyfleet.cli.main; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    command = [sys.executable, "-c", code]
    loaded = subprocess.run(command, capture_output=True, check=True, text=True).stdout.split()
    assert "typer" in loaded
    assert not {"torch", "scipy", "pyarrow", "transformers", "tokenizers", "numpy"} & set(loaded)


def test_tasks_list_has_a_line_for_each_task() -> None:
    lines = run("tasks", "list", SOURCE).splitlines()
    assert len(lines) == 3
    assert all(line.startswith("github-") for line in lines)


def test_tasks_show_prints_prompt_solution_and_verifier() -> None:
    shown = run("tasks", "show", SOURCE, keys()[0])
    assert shown.startswith(f"{keys()[0]}: github, seed-")
    assert "def " in shown


def test_train_dry_run_prints_the_configuration_and_the_plan(settings: str) -> None:
    output = run("train", settings, "trainer.seed=7", "--dry-run")
    assert load_config(output).trainer.seed == 7
    *plan, memory = [line for line in output.splitlines() if line.startswith("# ")]
    assert memory.startswith("# the run needs ")
    assert plan == [
        "# would train tiny on 4 tasks (4 github):",
        "# 3 warm-start steps, then 3 steps of 2 x 4 = 8 episodes",
        "# evaluating unseen on 3 tasks",
        "# evaluating elsewhere on 2 tasks",
    ]


@pytest.mark.parametrize("command", [["train"], ["evaluate", "--agent", "null"]])
def test_a_dry_run_prints_the_warnings_of_the_run(settings: str, command: list[str]) -> None:
    flag = "generator.use_native_tool_calling=true"
    assert f"# {flag} has no effect while environment." in run(
        *command, settings, flag, "--dry-run"
    )
    assert "no effect" not in run(*command, settings, "--dry-run")


def test_only_a_training_dry_run_warns_about_unused_training_keys(settings: str) -> None:
    unused = "trainer.algorithm.gamma=0.9"
    assert f"# {unused} has no effect while" in run("train", settings, unused, "--dry-run")
    assert "has no effect" not in run("evaluate", settings, unused, "--agent", "null", "--dry-run")


def test_train_dry_run_reports_unsupported_values(settings: str) -> None:
    unused = "trainer.algorithm.gamma=0.9"
    args = ["train", settings, "trainer.strategy=megatron", unused, "--dry-run"]
    result = CliRunner().invoke(app, args)
    assert str(result.exception).startswith("trainer.strategy='megatron' does not run")
    assert result.output.splitlines()[-1].startswith(f"# {unused} has no effect while")


def test_a_training_dry_run_lists_every_problem_and_no_configuration(settings: str) -> None:
    problems = ["trainer.strategy=megatron", "trainer.policy.model.path=./nowhere"]
    result = CliRunner().invoke(app, ["train", settings, *problems, "--dry-run"])
    assert [line.partition("=")[0] for line in str(result.exception).splitlines()] == [
        "trainer.strategy",
        "trainer.policy.model.path",
    ]
    assert all(line.startswith("# ") for line in result.output.splitlines())


def test_a_dry_run_refuses_what_the_run_would_refuse(settings: str, tmp_path: Path) -> None:
    for command in (["evaluate"], ["rollout", SOURCE]):
        with pytest.raises(ConfigError, match=r"trainer.strategy='megatron' does not run"):
            run(*command, settings, "trainer.strategy=megatron", "--dry-run")
        scripted = [*command, settings, "trainer.strategy=megatron", "--agent", "null", "--dry-run"]
        assert " null" in run(*scripted).splitlines()[-1]
        with pytest.raises(ConfigError, match="--agent null uses no checkpoint"):
            run(*scripted, "--checkpoint", str(tmp_path))
        with pytest.raises(ConfigError, match="holds no checkpoint yet"):
            run(*command, settings, "--dry-run")
        with pytest.raises(ConfigError, match="--checkpoint nowhere: no such folder"):
            run(*command, settings, "--checkpoint", "nowhere", "--dry-run")
    greedy = [
        "generator.eval_sampling_params.temperature=0",
        "generator.eval_n_samples_per_prompt=2",
    ]
    endpoint = ["--endpoint", "http://x", "--model", "x"]
    assert "pass@2 equals pass@1" in run("evaluate", settings, *greedy, *endpoint, "--dry-run")
    with pytest.raises(ConfigError, match=f"--output {settings}: {settings} is a file"):
        run("evaluate", settings, "--agent", "null", "--output", settings, "--dry-run")


def test_rollout_shows_every_turn_of_the_oracle() -> None:
    output = run("rollout", SOURCE, "--agent", "oracle", "--key", keys()[1])
    assert "[user]" in output
    assert "-> " in output
    assert f"{keys()[1]}: done" in output
    assert output.rstrip().endswith("grade 1")


def test_a_rollout_of_the_null_agent_has_grade_zero() -> None:
    assert run("rollout", SOURCE, "--agent", "null").rstrip().endswith("grade 0")
    planned = run("rollout", SOURCE, "--agent", "null", "--dry-run")
    assert planned.endswith(f"\n# would run {keys()[0]} with null\n")


def test_evaluate_selects_one_set_by_name(settings: str) -> None:
    output = run("evaluate", settings, "--agent", "null", "--eval-set", "elsewhere", "--dry-run")
    assert output.startswith("data:\n")
    assert output.endswith("\n# would score null on elsewhere\n")


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["train", "trainer.sead=1"], "trainer.sead=1 is unknown; did you mean trainer.seed?"),
        (["tasks", "show", SOURCE, "nobody"], f"{SOURCE} has no task 'nobody'"),
        (["evaluate", "--agent", "null"], "data.val_data is empty"),
        (["rollout", SOURCE, "trainer.policy.model.path=tiny"], "holds no checkpoint yet"),
        (["train", "no_such_file.yaml"], "no_such_file.yaml cannot be read as a configuration"),
        (
            ["train", "small.yaml", "--dry-run", "trainer.algorithm.policy_loss_type=no_such:loss"],
            "trainer.algorithm.policy_loss_type='no_such:loss' cannot be imported",
        ),
        (
            [
                "train",
                "small.yaml",
                "--dry-run",
                _SMOOTH,
                "trainer.algorithm.policy_loss_kwargs.widht=0.1",
            ],
            "got an unexpected keyword argument 'widht'; beside LossInputs it takes width=0.2; see",
        ),
        (
            ["train", "--dry-run", f"data.train_data=[{SOURCE}]", "trainer.policy.model.path=tiny"],
            "different tasks, but there are 3; lower it or add tasks",
        ),
        (
            ["train", "small.yaml", "--dry-run", "trainer.policy.model.path=./nowhere"],
            "trainer.policy.model.path='./nowhere' is not a model folder",
        ),
        (
            ["train", "small.yaml", "--dry-run", "trainer.sentinels.modes.moon=warn"],
            "trainer.sentinels.modes.moon is not a sentinel; choose from",
        ),
        (
            ["train", "small.yaml", "--dry-run", "environment.env_class=no_such:play"],
            "='no_such:play' cannot be imported",
        ),
        (
            [
                "train",
                "--dry-run",
                "trainer.strategy=megatron",
                f"data.train_data=[{SOURCE}]",
                *SMALL_BATCH,
            ],
            "trainer.strategy='megatron' does not run in this version",
        ),
    ],
)
def test_a_user_error_is_one_line_and_exit_code_two(
    args: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)  # a folder without runs
    Path("small.yaml").write_text(SETTINGS)
    monkeypatch.setattr(sys, "argv", ["skyfleet", *args])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    logged = capsys.readouterr().err
    assert logged.startswith("skyfleet: ")
    assert sentence in logged
    assert len(logged.splitlines()) == 1


def test_a_policy_is_trained_resumed_evaluated_and_rolled_out(
    settings: str, tmp_path: Path
) -> None:
    args = [settings, f"trainer.run_path={tmp_path}/run"]
    trained = run("train", *args, "trainer.max_training_steps=1")
    assert f"The run is in {tmp_path}/run" in trained
    resumed = run("train", *args, "trainer.max_training_steps=2")
    assert f"resuming test_run at step 1 from {tmp_path}/run/checkpoints/global_step_1\n" in resumed
    assert "unseen" in run("evaluate", *args, "--eval-set", "unseen")
    checkpoint = f"{tmp_path}/run/checkpoints/global_step_0"
    assert "grade 0" in run("rollout", SOURCE, *args, "--checkpoint", checkpoint)
    weights = Path(checkpoint, "policy", "model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    with pytest.raises(CheckpointError, match="has changed since it was saved"):
        run("rollout", SOURCE, *args, "--checkpoint", checkpoint)


def test_the_version_is_printed() -> None:
    assert run("--version").startswith("skyfleet 0.")


def test_tasks_of_a_world_are_exported_as_raw_rows(tmp_path: Path) -> None:
    file = tmp_path / "raw.jsonl"
    assert run("tasks", "export", SOURCE, "--output", str(file)) == f"wrote 3 tasks to {file}\n"
    assert [task.key for task in load_tasks(file)] == keys()


def test_exported_json_has_the_form_that_fleets_scripts_and_task_env_read(tmp_path: Path) -> None:
    file = tmp_path / "raw.json"
    run("tasks", "export", SOURCE, "--output", str(file))
    rows = json.loads(file.read_text())["tasks"]
    assert [row["task_key"] for row in rows if row["task_modality"] == "tool_use"] == keys()
    read_by_task_env = {"prompt", "env_key", "env_version", "data_key", "data_version"}
    assert read_by_task_env | {"env_variables", "verifier_code"} <= rows[0].keys()
    assert [task.key for task in load_tasks(file)] == keys()


def test_the_error_for_an_invalid_config_file_does_not_print_its_content(tmp_path: Path) -> None:
    file = tmp_path / "raw.yaml"
    file.write_text(json.dumps([{"key": "x" * 10_000}]))
    with pytest.raises(ConfigError) as caught:
        run("train", str(file))
    assert "a configuration is a mapping of keys" in str(caught.value)
    assert len(str(caught.value)) < 400
