"""Play the production path on this machine: the launch task's own commands, S3, Fleet, Slack, analysis.

`make loopback`, or from the repository's root `python -m benchmarks.loopback [--reuse]`. The trainer is
killed once, its machine lost once, and a second machine ends the run. Exits with 1 if anything that it
shows is not so. docs/production.md has a transcript.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from io import TextIOWrapper
from itertools import count
from pathlib import Path

import httpx
from benchmarks.loopback_checks import (
    Checks,
    LostRun,
    check_checkpoints,
    check_dumps,
    check_episodes,
    check_rows,
    check_secrets,
    check_thread,
    read_lost_run,
    read_recorded,
)
from benchmarks.loopback_machine import (
    ROOT,
    Command,
    Machine,
    read_task,
    serve,
    wait_until,
)
from tests.fakes.alert_server import AlertServer, serve_alerts
from tests.fakes.rclone_server import find_free_port

from skyfleet.checkpoints.bucket import BucketCheckpoints
from skyfleet.storage.objects import join, read_object, write_object

TASK = ROOT / "tasks" / "openenv-fleet-grpo.yaml"
ENVS = ("booking", "reddit")
WORLDS = [f"world:{name}?split=all&count=40&max_difficulty=1" for name in ENVS]
LAST_STEP, KILLED_STEP, LOST_STEP = 6, 2, 3
N_TASKS, N_SAMPLES, N_EVAL_SAMPLES = 4, 4, 2
OVERRIDES = f"""
trainer.policy.model.path=tiny
trainer.policy.model_config_kwargs={{hidden_size: 64, num_hidden_layers: 2, vocab_size: 768, initializer_range: 0.08}}
trainer.device=cpu
trainer.bf16=false
trainer.warm_start={{steps: 40, batch_size: 8, lr: 5.0e-3}}
trainer.max_training_steps={LAST_STEP}
trainer.eval_interval={LAST_STEP}
trainer.ckpt_interval=1
generator.n_samples_per_prompt={N_SAMPLES}
generator.eval_n_samples_per_prompt={N_EVAL_SAMPLES}
generator.max_turns=6
generator.max_input_length=1500
generator.sampling_params={{temperature: 1.0, max_generate_length: 64}}
generator.eval_sampling_params={{temperature: 1.0, max_generate_length: 64}}
"""
"""What makes the preset fleet_tool_use small: `tiny` instead of Qwen2.5-1.5B, and short episodes."""
KEYS = {
    "AWS_ACCESS_KEY_ID": "AKIALOOPBACK",
    "AWS_SECRET_ACCESS_KEY": "loopback-aws-secret",
    "FLEET_API_KEY": "loopback-fleet-key",
    "SLACK_BOT_TOKEN": "xoxb-loopback-token",
}
_NUMBERS = count(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(".venv/loopback"))
    parser.add_argument(
        "--reuse", action="store_true", help="keep virtual environments from before"
    )
    arguments = parser.parse_args()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers end too
    folder = arguments.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    checks = Checks()
    with ExitStack() as stack:
        play(folder, checks, stack, reuse=arguments.reuse)
    if checks.failed:
        sys.exit(f"loopback: {len(checks.failed)} checks failed: {'; '.join(checks.failed)}")
    print(f"\nloopback: all {checks.n_held} checks hold")


def play(folder: Path, checks: Checks, stack: ExitStack, *, reuse: bool) -> None:
    task, run_name = read_task(TASK), f"fleet_tool_use_{secrets.token_hex(4)}"
    title("Servers: S3, Fleet, Slack")
    dataset, slack = start_servers(folder, task.envs, stack)
    commit = run(["git", "rev-parse", "HEAD"], ROOT).strip()
    variables = {
        **KEYS,
        "AWS_ENDPOINT_URL": os.environ["AWS_ENDPOINT_URL"],
        "FLEET_BASE_URL": os.environ["FLEET_BASE_URL"],
        "SLACK_API_URL": f"{slack.url}/api/",
        "MODALITY": "tool_use",
        "EVAL_RATIO": "0.2",
        "OVERRIDES": OVERRIDES,
        "GIT_COMMIT": commit,
        "RUN_NAME": run_name,
        "RESTART_SECONDS": "1",
    }
    first, second = (
        Machine(home=folder / name, task=task, variables=variables)
        for name in ("machine_1", "machine_2")
    )
    bucket = BucketCheckpoints(
        address=f"s3://{task.envs['S3_CHECKPOINT_BUCKET']}/fleet-task-grpo/tiny/{run_name}"
    )
    trajectories = f"s3://{task.envs['S3_TRAJECTORY_BUCKET']}"

    with using(first, reuse=reuse):
        title(f"Machine 1: the task's set-up ({TASK.relative_to(ROOT)})")
        set_up(first, dataset, checks)
        title("Machine 1: the task's run; the trainer is killed, then the machine is lost")
        restarted, newest, lost = lose_machine(first, bucket, run_name, checks)

    with using(second, reuse=reuse):
        title("Machine 2: set-up and run in another folder, with nothing of machine 1")
        set_up(second, dataset, checks)
        finish(second, run_name, newest, checks)
        n_eval = sum(read_counts(second)["validation"])
        final = second.workdir / "runs" / run_name

        title("What is in the buckets")
        rows = read_object(join(trajectories, "runs", run_name, "metrics.jsonl")).decode()
        check_rows(checks, rows.splitlines(), lost, newest, LAST_STEP)
        checks.check(
            rows == (final / "metrics.jsonl").read_text(), "the bucket's rows are machine 2's"
        )
    check_checkpoints(checks, bucket, first_step=newest, last_step=LAST_STEP)
    check_episodes(
        checks,
        join(trajectories, "runs", run_name),
        lost,
        step=newest,
        episodes_per_step=N_TASKS * N_SAMPLES,
        episodes_per_eval=n_eval * N_EVAL_SAMPLES,
    )
    check_dumps(checks, join(trajectories, "evals", run_name), (0, LAST_STEP), ENVS)
    check_secrets(checks, [bucket.address, trajectories], list(KEYS.values()))

    title("The Slack thread")
    check_slack(checks, slack, restarted, newest, task.envs["SLACK_CHANNEL"])
    title("Analysis from S3, on a third machine")
    analyze(folder / "desk", join(trajectories, "runs", run_name), checks)
    left = [*first.list_processes(), *second.list_processes()]
    checks.check(not left, "no process of either machine is left")


def start_servers(
    folder: Path, envs: Mapping[str, str], stack: ExitStack
) -> tuple[bytes, AlertServer]:
    """Start the three; the dataset is in its bucket, and this process's environment names them."""
    s3, fleet = (f"http://127.0.0.1:{find_free_port()}" for _ in range(2))
    os.environ |= {**KEYS, "AWS_ENDPOINT_URL": s3, "AWS_REGION": envs["AWS_REGION"]}
    os.environ["FLEET_BASE_URL"] = fleet
    words = ["moto.server", "-H", "127.0.0.1", "-p", s3.rpartition(":")[2]]
    stack.enter_context(serve(words, folder / "s3.log"))
    wait_until(lambda: answers(s3), "the S3 server answers")
    for name in ("S3_DATASET_BUCKET", "S3_CHECKPOINT_BUCKET", "S3_TRAJECTORY_BUCKET"):
        httpx.put(f"{s3}/{envs[name]}", timeout=120).raise_for_status()
    print(f"  S3     {s3} (moto), with the buckets of the task file")

    raw = folder / "all_tool_use.json"
    skyfleet(["tasks", "export", *WORLDS, "--output", str(raw)], folder)
    dataset = raw.read_bytes()
    address = f"s3://{envs['S3_DATASET_BUCKET']}/{envs['DATA_VERSION']}/openenv/{raw.name}"
    write_object(address, dataset)
    print(f"  put {address}")

    words = ["skyfleet", "worlds", "serve", str(raw), "--protocol", "fleet"]
    stack.enter_context(serve([*words, "--port", fleet.rpartition(":")[2]], folder / "fleet.log"))
    wait_until(lambda: answers(fleet), "the Fleet server answers")
    print(f"  Fleet  {fleet} (skyfleet worlds serve --protocol fleet)")
    slack = stack.enter_context(serve_alerts())
    print(f"  Slack  {slack.url} (tests/fakes/alert_server.py)")
    return dataset, slack


@contextmanager
def using(machine: Machine, *, reuse: bool) -> Iterator[None]:
    """A machine with a clone and nothing else; at the end it is gone but for its environment."""
    machine.kill()  # of an earlier command that was killed
    machine.clear(keep_venv=reuse)
    machine.copy_clone()
    try:
        yield
    finally:
        machine.kill()
        machine.clear(keep_venv=True)


def set_up(machine: Machine, dataset: bytes, checks: Checks) -> None:
    command = start(machine, machine.task.setup)
    end(command, "set-up", checks)
    manifest = json.loads((machine.workdir / "data/fleet/tool_use/manifest.json").read_text())
    checks.check(
        manifest["source_sha256"] == hashlib.sha256(dataset).hexdigest(),
        f"the dataset {manifest['data_version']} is the one in S3",
    )


def lose_machine(
    machine: Machine, bucket: BucketCheckpoints, run_name: str, checks: Checks
) -> tuple[int, int, LostRun]:
    """Kill the trainer during rollouts, and everything later; the steps of both resumes."""
    folder = machine.workdir / "runs" / run_name
    command = start(machine, machine.task.run)
    process = command.process
    journal = folder / "journal" / f"step_{KILLED_STEP:06d}.jsonl"
    wait_until(lambda: count_lines(journal) > 0, f"step {KILLED_STEP}", process)
    machine.kill_trainer()
    recorded = read_recorded(journal)
    print(f"  SIGKILL to the trainer: {len(recorded)} episodes of step {KILLED_STEP} are recorded")
    found = wait_for_line(command, rf"step {KILLED_STEP}: (\d+) rollouts from the journal, (\d+)")
    restored, played = int(found[1]), int(found[2])
    checks.check(
        restored == len(recorded) and restored + played == N_TASKS * N_SAMPLES,
        f"run.sh started it again: {restored} episodes from the journal, {played} played",
    )
    restarted = int(wait_for_line(command, rf"resuming {run_name} at step (\d+)")[1])

    wait_until(
        lambda: (
            count_lines(folder / "metrics.jsonl") > LOST_STEP
            and (bucket.find_newest() or 0) > restarted
        ),
        f"the row of step {LOST_STEP}",
        process,
    )
    print(f"  SIGKILL to all {machine.kill()} processes of machine 1")
    archive = journal.name.replace(".jsonl", ".jsonl.gz")
    lost, newest = read_lost_run(folder, {archive: recorded}), bucket.find_newest()
    assert newest is not None
    checks.check(
        len(lost.rows) <= LAST_STEP, f"machine 1 had {len(lost.rows) - 1} of {LAST_STEP} steps"
    )
    write_object(join(bucket.step_address(LAST_STEP), "policy", "model.safetensors"), b"half")
    print(f"  complete in the bucket: {sorted(bucket.list_complete_steps())}")
    print(f"  put beside them: a part of step {LAST_STEP}, as a cut upload leaves it")
    print("  removed: all files of machine 1")
    return restarted, newest, lost


def finish(machine: Machine, run_name: str, newest: int, checks: Checks) -> None:
    checks.check(not (machine.workdir / "runs").exists(), "machine 2 has no run folder")
    command = start(machine, machine.task.run, RUN_NAME="", RESUME_RUN_NAME=run_name)
    end(command, "run", checks)
    resumed = re.search(rf"resuming {run_name} at step (\d+)", "\n".join(command.lines))
    checks.check(
        resumed is not None and int(resumed[1]) == newest,
        f"resumed at step {newest}, the newest complete one in the bucket",
    )


def check_slack(
    checks: Checks, slack: AlertServer, restarted: int, newest: int, channel: str
) -> None:
    posts = [post for post in slack.accepted if post["_path"].endswith("chat.postMessage")]
    for post in posts:
        lines = str(post["text"]).splitlines()
        print(f"  {'reply ' if post.get('thread_ts') else 'thread'} {lines[0]}")
        for line in lines[1:]:
            print(f"         {line}")
    expected = [
        f"started: {LAST_STEP} steps",
        "step 0: scores",
        f"resumed at step {restarted}",
        f"resumed at step {newest}",
        f"step {LAST_STEP}:",
        f"finished at step {LAST_STEP}",
    ]
    check_thread(checks, posts, expected, channel)


def analyze(desk: Path, address: str, checks: Checks) -> None:
    desk.mkdir(exist_ok=True)
    (desk / "report.html").unlink(missing_ok=True)
    output = skyfleet(["analyze", address], desk)
    checks.check(all(name in output for name in ENVS), "analyze reads the episodes in S3")
    skyfleet(["report", address], desk)
    reports = list(desk.glob("*.html"))
    checks.check(
        bool(reports) and all("<html" in path.read_text() for path in reports),
        f"report writes {', '.join(path.name for path in reports)}",
    )


def start(machine: Machine, script: str, **variables: str) -> Command:
    print(f"  $ {script.strip()}")
    return machine.start(script, show, **variables)


def end(command: Command, what: str, checks: Checks) -> None:
    if code := command.wait():
        raise SystemExit(f"loopback: {what} ended with code {code}")
    checks.check(True, f"{what} ended with code 0")


def show(line: str) -> None:
    print(f"  | {line}")


def skyfleet(words: Sequence[str], folder: Path) -> str:
    print(f"  $ skyfleet {' '.join(words)}".replace(f"{folder}/", ""))
    output = run([sys.executable, "-m", "skyfleet", *words], folder)
    for line in output.splitlines():
        show(line)
    return output


def run(words: Sequence[str], folder: Path) -> str:
    variables = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "110"}
    done = subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"loopback: {' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def wait_for_line(command: Command, pattern: str) -> re.Match[str]:
    found: list[re.Match[str]] = []

    def search() -> bool:
        found[:] = [hit for line in list(command.lines) if (hit := re.search(pattern, line))]
        return bool(found)

    wait_until(search, f"the line {pattern!r}", command.process)
    return found[0]


def answers(url: str) -> bool:
    try:
        httpx.get(url, timeout=120)
    except httpx.TransportError:
        return False
    return True


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def read_counts(machine: Machine) -> dict[str, list[int]]:
    manifest = json.loads((machine.workdir / "data/fleet/tool_use/manifest.json").read_text())
    return {
        side: [counts.get(side, 0) for counts in manifest["counts"].values()]
        for side in ("train", "validation")
    }


def title(text: str) -> None:
    print(f"\n== {next(_NUMBERS)}. {text} ==")


if __name__ == "__main__":
    main()
