"""Task files and plans: what is in them, what is checked before a launch, and no secret value anywhere."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from skyfleet.checkpoints.checkpoint import Manifest
from skyfleet.cli.launch import launch_plan
from skyfleet.cli.main import app
from skyfleet.config.loading import load_config, load_config_file
from skyfleet.errors import ConfigError
from skyfleet.launch.aws_keys import find_aws_keys, read_forwarded
from skyfleet.launch.credentials import write_credentials
from skyfleet.launch.plan import (
    LaunchOptions,
    LaunchPlan,
    check_resumable,
    plan_launch,
    plan_task_file,
)
from skyfleet.launch.resources import (
    choose_clouds,
    estimate_disk_gb,
    parse_gpus,
    read_parameters,
)
from skyfleet.launch.secrets import find_secret_names, read_secrets
from skyfleet.launch.shipped import SHIPPED_TASKS, ShippedTask, render_shipped_task
from skyfleet.launch.source_commit import find_commit
from skyfleet.launch.task_file import DEFAULT_VARIABLES, check_run_name, generate_run_name
from skyfleet.launch.variables import check_variables

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "launching.md").read_text(encoding="utf-8")
SEED_CLOUDS = {"lambda", "runpod", "vast", "primeintellect", "nebius"}


def plan(config: str = "fleet_tool_use", *overrides: str, **options: Any) -> LaunchPlan:
    return plan_launch(config, overrides, LaunchOptions(**options), root=ROOT, commit="c0ffee")


def read(text: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


@pytest.mark.parametrize("shipped", SHIPPED_TASKS, ids=lambda shipped: shipped.name)
def test_a_shipped_task_file_is_the_one_that_its_preset_renders(shipped: ShippedTask) -> None:
    file = ROOT / "tasks" / f"{shipped.name}.yaml"
    assert file.read_text() == render_shipped_task(shipped), "run python -m skyfleet.launch.shipped"


def test_every_file_in_tasks_is_shipped() -> None:
    names = {file.stem for file in (ROOT / "tasks").iterdir()}
    assert names == {shipped.name for shipped in SHIPPED_TASKS}


@pytest.mark.parametrize("shipped", SHIPPED_TASKS, ids=lambda shipped: shipped.name)
def test_a_task_file_names_its_secrets_and_holds_no_value(shipped: ShippedTask) -> None:
    task = read((ROOT / "tasks" / f"{shipped.name}.yaml").read_text())
    required = {name for name, value in task["envs"].items() if value is None}
    assert required == {"FLEET_API_KEY", "WANDB_API_KEY"}
    looks_secret = re.compile("KEY|TOKEN|SECRET")
    secret = {name: value for name, value in task["envs"].items() if looks_secret.search(name)}
    assert not any(value for name, value in secret.items() if name != "ENV_KEY")
    assert {entry["infra"] for entry in task["resources"]["any_of"]} >= SEED_CLOUDS


def test_the_scripts_read_every_variable_of_a_task_file_and_no_other() -> None:
    scripts = " ".join(
        path.read_text() for path in (ROOT / "src/skyfleet/launch/scripts").glob("*.sh")
    )
    unread = [name for name in DEFAULT_VARIABLES if not re.search(rf"\b{name}\b", scripts)]
    assert unread == []


@pytest.mark.parametrize("modality", ["tool_use", "computer_use", "both"])
def test_the_fleet_presets_have_the_guides_defaults(modality: str) -> None:
    config = load_config_file(f"fleet_{modality}")
    trainer, generator = config.trainer, config.generator
    assert trainer.policy.model.path == "Qwen/Qwen2.5-1.5B-Instruct"
    assert trainer.algorithm.advantage_estimator == "grpo"
    assert trainer.policy.optimizer_config.lr == 1e-6
    assert (trainer.train_batch_size, trainer.epochs, trainer.ckpt_interval) == (4, 20, 10)
    assert generator.max_turns == 50
    held_out = {"tool_use": ["outlook"], "computer_use": ["instacart"]}
    assert config.data.held_out_envs == held_out.get(modality, ["outlook", "instacart"])


def test_a_plan_passes_the_run_name_the_commit_and_the_overrides_on() -> None:
    made = plan("fleet_both", "trainer.seed=7", gpus="H200:8", variables={"DATA_VERSION": "v0.3"})
    task = read(made.text)
    assert re.fullmatch(r"fleet_both_[0-9a-f]{8}", made.run_name)
    envs = task["envs"]
    assert (task["name"], envs["RUN_NAME"]) == (made.run_name, made.run_name)
    assert (envs["GIT_COMMIT"], envs["OVERRIDES"]) == ("c0ffee", "trainer.seed=7")
    assert (envs["MODALITY"], envs["DATA_VERSION"], envs["CONFIG"]) == (
        "both",
        "v0.3",
        "fleet_both",
    )
    runpod = {entry["infra"]: entry for entry in task["resources"]["any_of"]}["runpod"]
    assert runpod["accelerators"] == "H200-SXM:8"
    assert plan("fleet_both", run_name=made.run_name).run_name == made.run_name


def test_spot_and_several_nodes_use_only_clouds_that_have_them() -> None:
    spot = read(plan(spot=True).text)["resources"]
    assert spot["use_spot"] is True
    assert spot["job_recovery"] == {"recover_on_exit_codes": [75]}  # and not 2, a mistake
    assert "lambda" not in [entry["infra"] for entry in spot["any_of"]]
    nodes = read(plan(nodes=2).text)
    assert (nodes["num_nodes"], nodes["envs"]["EXTRAS"]) == (2, "train,s3,slack,wandb,ray")
    assert "runpod" not in [entry["infra"] for entry in nodes["resources"]["any_of"]]
    with pytest.raises(ConfigError, match="--cloud lambda does not support --spot"):
        choose_clouds("lambda", spot=True, num_nodes=1)


@pytest.mark.parametrize(
    ("config", "override", "extra"),
    [
        ("smollm2_h200", "trainer.seed=1", "smollm2"),
        ("fleet_tool_use", "environment.env_class=openenv_fleet", "fleet"),
        ("smollm2_h200", "environment.env_class=skyrl_gym", "skyrl-gym"),
        ("smollm2_h200", "data.train_data=[agentdojo:workspace]", "agentdojo"),
        ("tiny", "trainer.logger=[console,mlflow]", "mlflow"),
        ("tiny", "generator.backend=vllm", "vllm"),
    ],
)
def test_a_machine_installs_what_the_configuration_needs(
    config: str, override: str, extra: str
) -> None:
    envs = read(plan(config, override).text)["envs"]
    extras = envs["EXTRAS"].split(",")
    assert extra in extras
    assert len(extras) == len(set(extras))
    optional = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras) <= optional["optional-dependencies"].keys()
    if extra == "mlflow":
        assert envs["LOGGER"] == "console,mlflow,wandb"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FLEET_BASE_URL", "https://user:pass-word@host/"),
        ("OVERRIDES", "trainer.alerts.webhook_url=https://hooks.slack.com/services/T0/B0/s3cr3t"),
    ],
)
def test_a_variable_with_a_secret_is_not_written_to_the_task_file(name: str, value: str) -> None:
    with pytest.raises(
        ConfigError, match="holds a secret, which would be written to the task file"
    ):
        plan(variables={name: value})


def test_the_buckets_are_those_of_the_configuration_and_none_without_keys() -> None:
    def buckets(*overrides: str, **options: Any) -> tuple[str, str]:
        envs = read(plan("tiny", *overrides, **options).text)["envs"]
        return envs["S3_CHECKPOINT_BUCKET"], envs["S3_TRAJECTORY_BUCKET"]

    own = "trainer.ckpt_bucket=mine"
    assert buckets() == ("skyrl-checkpoints", "skyrl-trajectories")
    assert buckets(own) == ("mine", "skyrl-trajectories")
    assert buckets(own, variables={"S3_CHECKPOINT_BUCKET": "other"})[0] == "other"
    assert buckets(has_aws_keys=False) == ("", "")
    assert buckets(own, has_aws_keys=False, resumes=True, run_name="r1") == ("mine", "")
    assert any("nothing is uploaded" in note for note in plan(has_aws_keys=False).notes)
    with pytest.raises(ConfigError, match="--resume reads the run's checkpoints from S3"):
        plan(has_aws_keys=False, resumes=True, run_name="r1")
    with pytest.raises(ConfigError, match=r"trainer\.run_name=mine: .*; use --run-name"):
        plan("tiny", "trainer.run_name=mine")


@pytest.mark.parametrize(
    "assignment",
    [
        *("CONFIG=tiny", "DATA_VERSION=", "MAX_TASKS=abc", "DIFFICULTY=hard", "EVAL_RATIO=7"),
        *("TASKS_JSON=nope.json", "LOGGER=foo", "EXTRAS=foo", "MAX_RESTARTS=x"),
        *("FLEET_BASE_URL=nonsense", "S3_CHECKPOINT_BUCKET=No_Bucket", "DATASET=fleets"),
        *("PREFLIGHT=yes", "CONSTRAINTS=none.txt", "DOLLARS_PER_HOUR=3", "MODALITY=browser"),
    ],
)
def test_a_wrong_variable_is_found_before_anything_is_paid_for(assignment: str) -> None:
    name, _, value = assignment.partition("=")
    with pytest.raises(ConfigError, match=name):
        plan(variables={name: value})


def test_every_wrong_variable_is_named_and_the_defaults_are_valid() -> None:
    check_variables(DEFAULT_VARIABLES, ROOT)
    right = {"MAX_TASKS": "50", "DIFFICULTY": "1,2", "EVAL_RATIO": "0.2", "EXTRAS": "train,s3"}
    right |= {"DOLLARS_PER_HOUR": "lambda=2.99,runpod=3", "S3_CHECKPOINT_BUCKET": "gs://mine"}
    check_variables({**DEFAULT_VARIABLES, **right}, ROOT)
    with pytest.raises(ConfigError, match=r"DIFFICULTY='x' .*\nMAX_TASKS='0' is wrong"):
        check_variables({**DEFAULT_VARIABLES, "MAX_TASKS": "0", "DIFFICULTY": "x"}, ROOT)


def test_a_model_that_does_not_fit_on_the_gpu_or_the_disk_is_refused() -> None:
    # With LoRA 8e9 x 2 bytes and 0.7 of them again, else 16 bytes.
    with pytest.raises(ConfigError, match=r"--gpus A10: Qwen/Qwen3-8B needs 27 GB at least"):
        plan("fleet_qwen3_8b", gpus="A10:1")
    with pytest.raises(
        ConfigError, match=r"needs 128 GB at least .*; use a larger one, or trainer"
    ):
        plan("fleet_qwen3_8b", "trainer.policy.model.lora.rank=0", gpus="H100:1")
    plan("fleet_qwen3_8b", gpus="H100:1")
    with pytest.raises(ConfigError, match=r"--disk-gb 1 is too small"):
        plan(disk_gb=1)


def test_a_dataset_in_s3_without_keys_refuses_the_launch_unless_another_is_named() -> None:
    refused = plan("fleet_both", has_aws_keys=False)
    assert refused.dataset == tuple(
        f"s3://fleet-internal-datasets/v0.2/openenv/all_{name}.json"
        for name in ("tool_use", "computer_use")
    )
    assert "and there are no AWS keys here" in refused.problems[0]
    assert plan("fleet_both").problems == ()
    for variables in ({"DATASET": ""}, {"TASKS_JSON": "gs://mine/tasks.json"}):
        assert plan(has_aws_keys=False, variables=variables).problems == ()
    own = plan("tiny", "data.train_data=['s3://mine/tasks.jsonl']", has_aws_keys=False)
    assert own.problems[0].startswith("the dataset is s3://mine/tasks.jsonl, and there are no")
    with pytest.raises(ConfigError, match="no AWS keys here"):
        launch_plan(refused, root=ROOT, spot=False, attach=False)


def test_services_of_this_environment_are_those_of_the_machine() -> None:
    environment = {"AWS_REGION": "eu-west-1", "WANDB_BASE_URL": "https://wandb.example.com"}
    made = plan(environment=environment, variables={"AWS_REGION": "eu-north-1"})
    envs = read(made.text)["envs"]
    assert (envs["AWS_REGION"], envs["WANDB_BASE_URL"]) == (
        "eu-north-1",
        "https://wandb.example.com",
    )
    assert "WANDB_BASE_URL=https://wandb.example.com, from this environment" in made.notes
    built = read((ROOT / "tasks" / "openenv-fleet-grpo.yaml").read_text())
    built["envs"]["AWS_REGION"] = "us-west-2"
    task = read(plan_file(built, environment=environment).text)
    assert task["envs"]["AWS_REGION"] == "us-west-2"


def test_a_configuration_of_another_modality_is_a_warning() -> None:
    (note,) = [note for note in plan(modality="computer_use").notes if "warning" in note]
    assert "has the settings and data of tool_use, and the run is one of computer_use" in note
    assert not any("warning" in note for note in plan("fleet_both").notes)


def test_aws_keys_come_from_variables_files_or_botocore(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name in ("CREDENTIALS", "CONFIG"):
        variable = "AWS_CONFIG_FILE" if name == "CONFIG" else "AWS_SHARED_CREDENTIALS_FILE"
        monkeypatch.setenv(variable, str(tmp_path / name.lower()))
    assert find_aws_keys() is None
    answer = {
        "Version": 1,
        "AccessKeyId": "p",
        "SecretAccessKey": "q",
        "SessionToken": "t",
        "Expiration": "2126-11-18T21:00:00Z",
    }
    (tmp_path / "answer").write_text(json.dumps(answer))
    (tmp_path / "config").write_text(
        "[profile team]\nregion = eu-west-1\n"
        f"[profile process]\ncredential_process = cat {tmp_path}/answer\n"
    )
    (tmp_path / "credentials").write_text(
        "[team]\naws_access_key_id = a\naws_secret_access_key = b\n"
    )
    monkeypatch.setenv("AWS_PROFILE", "team")
    found = find_aws_keys()
    assert found is not None
    assert found.secrets == {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    assert found.describe() == ("AWS keys: from profile team",)
    assert read_forwarded({}, found) == {"AWS_REGION": "eu-west-1"}
    monkeypatch.setenv("AWS_PROFILE", "process")
    session = find_aws_keys()
    assert session is not None
    assert session.secrets["AWS_SESSION_TOKEN"] == "t"
    assert "expires at 2126-11-18 21:00 UTC" in session.describe()[-1]
    monkeypatch.setenv("AWS_PROFILE", "gone")
    with pytest.raises(ConfigError, match=r"AWS_PROFILE=gone: .*gone.*; log in"):
        find_aws_keys()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    with pytest.raises(ConfigError, match="set both or neither"):
        find_aws_keys()


def test_a_run_without_a_checkpoint_in_its_bucket_is_not_resumed(tmp_path: Path) -> None:
    made = plan("tiny", f"trainer.ckpt_bucket={tmp_path}", run_name="nosuch", resumes=True)
    with pytest.raises(
        ConfigError, match=r"--resume nosuch: .*/tiny/nosuch has no complete checkpoint"
    ):
        check_resumable(made)
    folder = tmp_path / "skyfleet" / "tiny" / "nosuch" / "global_step_3"
    folder.mkdir(parents=True)
    manifest = Manifest(step=3, skyfleet_version="0.2.0", parts=(), files={})
    (folder / "manifest.json").write_text(manifest.model_dump_json())
    assert check_resumable(made).endswith("/tiny/nosuch/global_step_3")


def test_a_task_file_keeps_its_resources_except_where_an_option_changes_them() -> None:
    built = read((ROOT / "tasks" / "openenv-fleet-grpo-qwen3-8b.yaml").read_text())
    same = read(plan_file(built, run_name="r1").text)
    assert same["resources"] == built["resources"]
    assert same["envs"]["CONFIG"] == "fleet_qwen3_8b"
    other = plan_file(built, cloud="runpod,vast", gpus="B200:2", modality="both", wandb=False)
    resources = read(other.text)["resources"]
    assert [entry["infra"] for entry in resources["any_of"]] == ["runpod", "vast"]
    assert resources["disk_size"] == built["resources"]["disk_size"]
    assert (other.modality, other.secret_names.required) == ("both", ("FLEET_API_KEY",))


def plan_file(built: dict[str, Any], *overrides: str, **options: Any) -> LaunchPlan:
    return plan_task_file(built, "t.yaml", overrides, LaunchOptions(**options), root=ROOT)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"envs": {"FLEET_API_KEY": "literal"}}, r"t\.yaml holds a value of FLEET_API_KEY"),
        ({"envs": {"CONFIG": "no_such"}}, "no_such is neither a file nor a preset"),
        ({"envs": {"OVERRIDES": "trainer.sede=1"}}, r"trainer\.sede=1 is unknown"),
        ({"resources": {"any_of": [{"infra": "aws"}]}}, r"t\.yaml is not a task file of skyfleet"),
    ],
)
def test_a_mistake_in_a_task_file_is_found_before_the_launch(
    changed: dict[str, dict[str, Any]], sentence: str
) -> None:
    built = read((ROOT / "tasks" / "openenv-fleet-grpo.yaml").read_text())
    for section, values in changed.items():
        built[section] |= values
    with pytest.raises(ConfigError, match=sentence) as caught:
        plan_file(built)
    assert "literal" not in str(caught.value)


def test_a_configuration_of_worlds_needs_no_fleet_key_and_prepares_no_dataset() -> None:
    made = plan("tiny", wandb=False)
    assert made.secret_names.required == ()
    assert read(made.text)["envs"]["DATASET"] == ""


def test_a_secret_in_the_configuration_is_refused_and_a_reference_becomes_a_required_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = "environment.skyrl_gym.fleet_task.api_key"
    with pytest.raises(ConfigError, match=f"{key} holds a secret") as caught:
        plan("fleet_tool_use", f"{key}=fleet-literal-value-1")
    assert "fleet-literal-value-1" not in str(caught.value)
    monkeypatch.setenv("MY_FLEET_KEY", "value-of-my-fleet-key")
    made = plan("fleet_tool_use", f"{key}=${{oc.env:MY_FLEET_KEY}}")
    assert "MY_FLEET_KEY" in made.secret_names.required
    assert "value-of-my-fleet-key" not in made.text


def test_missing_secrets_are_named_at_once_and_wandbs_key_depends_on_the_modality() -> None:
    names = find_secret_names(load_config_file("fleet_tool_use"), wandb=True)
    with pytest.raises(ConfigError, match="FLEET_API_KEY, WANDB_API_KEY are not set") as caught:
        read_secrets(names, "tool_use", {"WANDB_API_KEY_COMPUTER_USE": "c"})
    assert "WANDB_API_KEY_TOOL_USE" in str(caught.value)
    environ = {"FLEET_API_KEY": "f", "WANDB_API_KEY_COMPUTER_USE": "c", "WANDB_API_KEY": "w"}
    assert read_secrets(names, "computer_use", environ)["WANDB_API_KEY"] == "c"
    assert read_secrets(names, "tool_use", environ)["WANDB_API_KEY"] == "w"
    with pytest.raises(ConfigError, match="set both or neither"):
        read_secrets(names, "tool_use", {**environ, "AWS_ACCESS_KEY_ID": "a"})


@pytest.mark.parametrize("text", ["H1000:1", "H200:x", "H200:0", "H200:99"])
def test_an_unknown_gpu_or_number_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--gpus {text}"):
        parse_gpus(text)


def test_the_disk_holds_the_weights_and_the_checkpoints_that_are_there_at_once() -> None:
    def disk(path: str, keep: int = 2, lora: int = 0, *, uploads: bool = True) -> int:
        config = load_config(
            f"trainer: {{policy: {{model: {{path: {path}, lora: {{rank: {lora}}}}}}}, "
            f"max_ckpts_to_keep: {keep}}}"
        )
        return estimate_disk_gb(config, uploads=uploads)

    # 1.25 x (40 + 30 + 2 x 32 + 5 x 14 x 32) GB, up to the next 50: two, those of step 0 and of the
    # best step, and one that is being written
    assert disk("Qwen/Qwen3-32B") == 3000
    assert disk("Qwen/Qwen3-32B", keep=50) == 3000
    assert disk("Qwen/Qwen3-8B", lora=32) < disk("Qwen/Qwen3-8B")
    assert disk("Qwen/Qwen3-8B", keep=-1, uploads=False) > disk("Qwen/Qwen3-8B", keep=-1)


@pytest.mark.parametrize(
    ("path", "parameters"),
    [
        ("Qwen/Qwen3-8B", 8e9),
        ("Qwen/Qwen2.5-1.5B-Instruct", 1.5e9),
        ("Qwen/Qwen3-30B-A3B", 30e9),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 1.35e8),
    ],
)
def test_a_models_size_is_read_from_its_name(path: str, parameters: float) -> None:
    assert read_parameters(path) == parameters


def test_a_model_of_unknown_size_asks_for_the_disk() -> None:
    with pytest.raises(ConfigError, match="--disk-gb"):
        read_parameters("zai-org/GLM-4.7-Flash")


def test_run_names_are_skypilots_cluster_names() -> None:
    assert len({generate_run_name("tool_use") for _ in range(20)}) == 20
    with pytest.raises(ConfigError, match="start with a letter"):
        check_run_name("0_run")


def test_credentials_are_written_once_for_this_user_only(tmp_path: Path) -> None:
    environ = {"LAMBDA_API_KEY": "lam", "NEBIUS_CREDENTIALS_JSON": "{}", "VAST_API_KEY": " "}
    written = write_credentials(tmp_path, environ)
    names = [path.relative_to(tmp_path).as_posix() for path in written]
    assert names == [".lambda_cloud/lambda_keys", ".nebius/credentials.json"]
    assert [path.stat().st_mode & 0o777 for path in written] == [0o600, 0o600]
    assert write_credentials(tmp_path, {"LAMBDA_API_KEY": "other"}) == []
    assert written[0].read_text() == "api_key = lam\n"


def test_a_commit_says_whether_files_were_changed(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True)

    with pytest.raises(ConfigError, match="not in a git repository"):
        find_commit(tmp_path)
    git("init", "-q")
    run_script = tmp_path / "src/skyfleet/launch/scripts/run.sh"
    run_script.parent.mkdir(parents=True)
    run_script.touch()
    git("add", "-A")
    git("commit", "-qm", "Start")
    clean = find_commit(tmp_path)
    assert (len(str(clean)), clean.dirty) == (40, False)
    run_script.write_text("echo")
    assert str(find_commit(run_script.parent)) == f"{clean.sha}-dirty"


@pytest.mark.parametrize(
    "command",
    [
        re.search(r"^skyfleet (launch .* --dry-run)$", PAGE, re.MULTILINE)[1],  # type: ignore[index]
        "launch tasks/openenv-fleet-grpo-qwen3-8b.yaml --gpus H200:8 --dry-run",
        "launch fleet_qwen3_8b --gpus H200:8 --dry-run generator.max_turns=20",
    ],
)
def test_a_launch_dry_run_prints_a_task_file_and_the_plan(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    for name in ("FLEET_API_KEY", "WANDB_API_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, "/nonexistent")
    result = CliRunner().invoke(app, command.split(), catch_exceptions=False)
    assert result.exit_code == 0
    entries = read(result.output)["resources"]["any_of"]
    assert {"infra": "nebius", "accelerators": "H200:8"} in entries
    assert "# secrets: FLEET_API_KEY, WANDB_API_KEY" in result.output
    assert "# this version trains on one GPU" in result.output
    assert "# would be refused: FLEET_API_KEY, WANDB_API_KEY are not set here" in result.output


def test_a_launch_without_a_configuration_or_with_a_secret_as_a_variable_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    for command, sentence in {
        "launch trainer.seed=1 --dry-run": "needs a configuration or a task file",
        "launch tiny --env FLEET_API_KEY=x --dry-run": "--env FLEET_API_KEY: write NAME=VALUE",
        "launch tiny --env RUN_NAME=x --dry-run": "--env RUN_NAME: .*; use --run-name",
        "launch tiny --env RESUME_RUN_NAME=x --dry-run": "--env RESUME_RUN_NAME: use --resume",
        "launch tiny --resume a --run-name b --dry-run": "--resume a and --run-name b: use one",
    }.items():
        with pytest.raises(ConfigError, match=sentence):
            CliRunner().invoke(app, command.split(), catch_exceptions=False)
