"""The task's own commands: set-up, run and drain, with a shell script in place of the trainer."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = Path("src/skyfleet/launch/scripts")
pytestmark = pytest.mark.skipif(
    shutil.which("setsid") is None or shutil.which("flock") is None,
    reason="the scripts need setsid and flock: apt-get install util-linux",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    clone: Path
    home: Path

    def variables(self, **variables: str) -> dict[str, str]:
        base = {"PATH": os.environ["PATH"], "HOME": str(self.home), "RESTART_SECONDS": "0"}
        base["POLL_SECONDS"] = "0.1"
        return {**base, "RUN_NAME": "fleet_tool_use_0011aabb", **variables}

    def run(self, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(SCRIPTS / script)],
            cwd=self.clone,
            env=self.variables(**variables),
            capture_output=True,
            text=True,
            timeout=60,
        )

    def start(self, script: str, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(SCRIPTS / script)],
            cwd=self.clone,
            env=self.variables(**variables),
            stdout=subprocess.DEVNULL,
            text=True,
        )

    def calls(self) -> list[list[str]]:
        log = self.home / "calls"
        return [line.split("|")[:-1] for line in log.read_text().splitlines()]


TRAINER = r"""#!/usr/bin/env bash
[[ $1 != preflight && $1 != --version ]] || exit 1
printf '%s|' "$@" >>"$HOME/calls"; echo >>"$HOME/calls"
env >"$HOME/environment"
"""


@pytest.fixture
def machine(tmp_path: Path) -> Callable[[str], Machine]:
    """Builds a machine with a complete environment whose `skyfleet` runs the given lines."""

    def build(lines: str = "") -> Machine:
        clone, home = tmp_path / "clone", tmp_path / "home"
        (clone / SCRIPTS).parent.mkdir(parents=True)
        home.mkdir()
        shutil.copytree(ROOT / SCRIPTS, clone / SCRIPTS)
        for name in ("pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, clone / name)
        made = Machine(clone=clone, home=home)
        echo_venv = f'. {SCRIPTS}/common.sh && echo "$venv"'
        found = subprocess.run(
            ["bash", "-c", echo_venv],
            cwd=clone,
            env=made.variables(),
            capture_output=True,
            text=True,
        )
        program = Path(found.stdout.strip()) / "bin" / "skyfleet"
        program.parent.mkdir(parents=True)
        program.write_text(TRAINER.replace("exit 1", "exit 0") + lines)
        program.chmod(0o755)
        (program.parents[1] / "complete").touch()
        return made

    return build


def wait_for(path: Path) -> None:
    for _ in range(600):
        if path.exists():
            return
        time.sleep(0.05)
    pytest.fail(f"{path.name} was not written within 30 s")


def test_the_trainer_gets_the_run_name_the_data_the_buckets_and_the_overrides_last(
    machine: Callable[[str], Machine],
) -> None:
    made = machine("")
    for modality in ("tool_use", "computer_use"):
        folder = made.clone / "data" / "fleet" / modality
        folder.mkdir(parents=True)
        (folder / "train.parquet").touch()
    (made.clone / "data/fleet/tool_use/validation.parquet").touch()
    done = made.run(
        "run.sh",
        MODALITY="both",
        PREFLIGHT="0",
        S3_CHECKPOINT_BUCKET="ckpts",
        S3_TRAJECTORY_BUCKET="dumps",
        WANDB_API_KEY="wandb-secret-value",
        SLACK_BOT_TOKEN="xoxb-secret-value",
        SLACK_CHANNEL="#runs",
        AWS_ENDPOINT_URL="",
        OVERRIDES="trainer.seed=7\ngenerator.sampling_params={temperature: 1.0}",
    )
    assert done.returncode == 0, done.stderr
    assert made.calls() == [
        [
            *("train", "fleet_both", "trainer.run_name=fleet_tool_use_0011aabb"),
            "data.train_data=[data/fleet/tool_use/train.parquet,data/fleet/computer_use/train.parquet]",
            "data.val_data=[data/fleet/tool_use/validation.parquet]",
            *("trainer.ckpt_bucket=ckpts", "trainer.trajectory_bucket=dumps"),
            *("trainer.logger=[console,wandb]", "trainer.alerts.slack_channel=runs"),
            "trainer.seed=7",
            "generator.sampling_params={temperature: 1.0}",
        ]
    ]
    assert "secret-value" not in done.stdout + done.stderr
    environment = (made.home / "environment").read_text()
    assert "AWS_ENDPOINT_URL" not in environment  # an empty one is not a value


@pytest.mark.parametrize(
    ("codes", "ended_with", "starts"),
    [("1 137 0", 0, 3), ("2", 2, 1), ("139 139 139", 139, 3), ("143", 143, 1)],
    ids=["crashes", "mistake", "crashes-too-often", "stopped"],
)
def test_a_crash_restarts_the_same_command_and_a_mistake_or_a_stop_does_not(
    machine: Callable[[str], Machine], codes: str, ended_with: int, starts: int
) -> None:
    made = machine(
        f'codes=({codes}); exit "${{codes[$(($(wc -l <"$HOME/calls") - 1))]}}"\n',
    )
    done = made.run("run.sh", DATASET="", PREFLIGHT="0", MAX_RESTARTS="2")
    assert (done.returncode, len(made.calls())) == (ended_with, starts)
    assert all(call == made.calls()[0] for call in made.calls())


@pytest.mark.parametrize(
    ("prices", "given"), [("lambda=2.99,runpod=3.59", ["3.59"]), ("lambda=2.99", []), ("", [])]
)
def test_the_trainer_learns_the_price_of_the_cloud_that_it_runs_on(
    machine: Callable[[str], Machine], prices: str, given: list[str]
) -> None:
    made = machine("exit 0\n")
    info = '{"cluster_name": "c", "cloud": "RunPod", "region": "CA", "zone": null}'
    variables = {"SKYPILOT_CLUSTER_INFO": info, "DOLLARS_PER_HOUR": prices}
    assert made.run("run.sh", DATASET="", PREFLIGHT="0", **variables).returncode == 0
    (call,) = made.calls()
    key = "trainer.alerts.dollars_per_hour="
    assert [a.removeprefix(key) for a in call if a.startswith(key)] == given


@pytest.mark.parametrize(
    ("codes", "ended_with", "tries"),
    [("1 0", 0, 2), ("1 1", 2, 2), ("75 75 0", 0, 3), ("75 75 75", 75, 3), ("75 1", 2, 2)],
    ids=["once", "mistake", "outage-ends", "outage", "outage-then-mistake"],
)
def test_preflight_is_tried_again_and_an_outage_ends_with_75(
    machine: Callable[[str], Machine], codes: str, ended_with: int, tries: int
) -> None:
    made = machine("exit 0\n")
    (program,) = (made.home / ".skyfleet").glob("venv-*/bin/skyfleet")
    program.write_text(
        '#!/bin/bash\n[[ $1 == preflight ]] || exit 0\necho "try|" >>"$HOME/calls"\n'
        f'codes=({codes}); exit "${{codes[$(($(wc -l <"$HOME/calls") - 1))]}}"\n'
    )
    done = made.run("run.sh", DATASET="", MAX_RESTARTS="2")
    assert (done.returncode, len(made.calls())) == (ended_with, tries), done.stderr


def test_a_stop_before_the_trainer_has_a_number_reaches_it(
    machine: Callable[[str], Machine],
) -> None:
    made = machine(UPLOADING)
    slow = made.home / "setsid"
    slow.write_text(f'#!/bin/bash\ntouch "$HOME/forking"; sleep 1\n{shutil.which("setsid")} "$@"\n')
    slow.chmod(0o755)
    path = f"{made.home}:{os.environ['PATH']}"
    job = made.start("run.sh", DATASET="", PREFLIGHT="0", PATH=path)
    wait_for(made.home / "forking")
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=30) == 143  # a lost signal would leave the trainer running


UPLOADING = """
echo "started"; touch "$HOME/started"
trap 'sleep 1.5; touch "$HOME/uploaded"; exit 143' TERM
while true; do sleep 0.1; done
"""


def test_a_trainer_outlives_its_killed_job_until_its_uploads_are_complete(
    machine: Callable[[str], Machine],
) -> None:
    made = machine(UPLOADING)
    job = made.start("run.sh", DATASET="", PREFLIGHT="0")
    wait_for(made.home / "started")
    wait_for(made.home / ".skyfleet" / "trainer.pid")
    job.send_signal(signal.SIGTERM)  # what SkyPilot does when a job is cancelled,
    time.sleep(0.3)
    job.kill()  # and what it does 30 seconds later
    job.wait()
    assert not (made.home / "uploaded").exists()
    drained = made.run("drain.sh", DRAIN_SECONDS="20")
    assert (drained.returncode, (made.home / "uploaded").exists()) == (0, True)
    assert "ended after" in drained.stdout


def test_a_cancelled_job_waits_for_its_trainer(machine: Callable[[str], Machine]) -> None:
    made = machine(UPLOADING)
    job = made.start("run.sh", DATASET="", PREFLIGHT="0")
    wait_for(made.home / "started")
    wait_for(made.home / ".skyfleet" / "trainer.pid")
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=30) == 143
    assert (made.home / "uploaded").exists()
    assert len(made.calls()) == 1


def test_drain_without_a_trainer_ends_at_once_and_a_stuck_one_is_an_error(
    machine: Callable[[str], Machine],
) -> None:
    made = machine('touch "$HOME/started"; trap "" TERM; while true; do sleep 0.1; done\n')
    assert made.run("drain.sh").returncode == 0
    job = made.start("run.sh", DATASET="", PREFLIGHT="0")
    wait_for(made.home / "started")
    pid_file = made.home / ".skyfleet" / "trainer.pid"
    wait_for(pid_file)
    try:
        assert made.run("drain.sh", DRAIN_SECONDS="1").returncode == 1
    finally:
        job.kill()
        job.wait()
        os.kill(int(pid_file.read_text()), signal.SIGKILL)


def test_the_run_name_follows_skypilots_task_id_which_a_recovered_job_keeps(
    machine: Callable[[str], Machine],
) -> None:
    made = machine("")
    task_id = "sky-managed-2026-11-16-10-00-00-000000_fleet_3-0"
    for _ in range(2):
        done = made.run("run.sh", DATASET="", PREFLIGHT="0", RUN_NAME="", SKYPILOT_TASK_ID=task_id)
        assert done.returncode == 0, done.stderr
    (first, second) = [call[2] for call in made.calls()]
    assert first == second
    assert first.startswith("trainer.run_name=fleet_tool_use_")
    made.run("run.sh", DATASET="", PREFLIGHT="0", RESUME_RUN_NAME="fleet_tool_use_a7e85045")
    assert made.calls()[-1][2] == "trainer.run_name=fleet_tool_use_a7e85045"


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"MODALITY": "browser"}, "MODALITY=browser is unknown"),
        ({"RUN_NAME": "a b; rm -rf x"}, "use letters, digits"),
        ({"RUN_NAME": ""}, "RUN_NAME is empty and this is not a SkyPilot job"),
    ],
)
def test_a_wrong_variable_is_one_sentence_and_code_2(
    machine: Callable[[str], Machine], variables: dict[str, str], sentence: str
) -> None:
    done = machine("").run("run.sh", DATASET="", PREFLIGHT="0", **variables)
    assert done.returncode == 2
    assert sentence in done.stderr


def test_setup_reuses_a_complete_environment_and_passes_every_filter_to_prepare(
    machine: Callable[[str], Machine],
) -> None:
    made = machine("")
    done = made.run(
        "setup.sh",
        MODALITY="both",
        ENV_KEY="booking,github",
        DIFFICULTY="1,2",
        MAX_TASKS="50",
        EVAL_RATIO="0.2",
        DATA_VERSION="v0.3",
        S3_DATASET_BUCKET="sets",
    )
    assert done.returncode == 0, done.stderr
    assert "reusing" in done.stdout
    filters = ["--env-filter", "booking,github", "--difficulty-filter", "1,2"]
    filters += ["--max-tasks", "50", "--eval-ratio", "0.2", "--data-version", "v0.3"]
    source = ["--tasks-json", "s3://sets/v0.3/openenv/all_{modality}.json"]
    folder = ["--output-dir", "data/fleet/{modality}", "--modality", "both"]
    assert made.calls() == [["tasks", "prepare", *source, *folder, *filters]]


def test_setup_without_fleets_dataset_prepares_nothing(machine: Callable[[str], Machine]) -> None:
    made = machine("")
    assert made.run("setup.sh", DATASET="").returncode == 0
    assert not (made.home / "calls").exists()


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("ray") is None, reason="no ray here: pip install -e '.[ray]'")
def test_several_nodes_form_one_ray_cluster_which_ends_with_the_run(
    machine: Callable[[str], Machine],
) -> None:
    """Two nodes on this machine; real Ray."""
    made = machine('echo "$RAY_ADDRESS" >"$HOME/ray_address"; sleep 2\n')
    ray = Path(shutil.which("ray") or "")
    (venv,) = (made.home / ".skyfleet").glob("venv-*/")
    for program in ("ray", "python"):
        wrapper = venv / "bin" / program
        wrapper.write_text(f'#!/bin/sh\nexec {ray.parent / program} "$@"\n')
        wrapper.chmod(0o755)
    nodes = {
        "DATASET": "",
        "PREFLIGHT": "0",
        "RAY_PORT": "6591",
        "FLEET_API_KEY": "shared",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
        "RAY_OBJECT_STORE_BYTES": "100000000",
    }
    worker = made.start("run.sh", SKYPILOT_NODE_RANK="1", **nodes)
    head = made.start("run.sh", SKYPILOT_NODE_RANK="0", **nodes)
    assert head.wait(timeout=180) == 0
    assert (made.home / "ray_address").read_text() == "127.0.0.1:6591\n"
    assert worker.wait(timeout=180) == 0
