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
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import TextIOWrapper
from pathlib import Path

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
    wait_until,
)
from benchmarks.loopback_servers import ENVS, KEYS, start_servers
from benchmarks.loopback_transcript import print_title, run_command, run_skyfleet, show_line
from tests.fakes.alert_server import AlertServer

from skyfleet.checkpoints.bucket import BucketCheckpoints
from skyfleet.storage.bucket_lock import OWNER
from skyfleet.storage.lock_owner import parse_owner
from skyfleet.storage.objects import join, read_object, write_object

TASK = ROOT / "tasks" / "openenv-fleet-grpo.yaml"
LAST_STEP, KILLED_STEP, LOST_STEP = 6, 2, 3
N_TASKS, N_SAMPLES, N_EVAL_SAMPLES = 4, 4, 2
OVERRIDES = f"""
trainer.policy.model.path=tiny
trainer.policy.model_config_kwargs={{hidden_size: 64, num_hidden_layers: 2, vocab_size: 768, initializer_range: 0.08}}
trainer.device=cpu
trainer.bf16=false
trainer.warm_start={{steps: 150, batch_size: 8, lr: 5.0e-3}}
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
LOST_HOST = "lost-machine-1"


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
    print_title("Servers: S3, Fleet, Slack")
    dataset, slack = start_servers(folder, task.envs, stack)
    commit = run_command(["git", "rev-parse", "HEAD"], ROOT).strip()
    if run_command(["git", "status", "--porcelain"], ROOT):
        commit += "-dirty"  # as `skyfleet launch --allow-dirty` names it
    variables = {
        **KEYS,
        "AWS_ENDPOINT_URL": os.environ["AWS_ENDPOINT_URL"],
        "FLEET_BASE_URL": os.environ["FLEET_BASE_URL"],
        "SLACK_API_URL": f"{slack.url}/api/",
        "MODALITY": "tool_use",
        "EVAL_RATIO": "0.05",
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

    with use_machine(first, reuse=reuse):
        print_title(f"Machine 1: the task's set-up ({TASK.relative_to(ROOT)})")
        set_up(first, dataset, checks)
        print_title("Machine 1: the task's run; the trainer is killed, then the machine is lost")
        restarted, newest, lost = lose_machine(first, bucket, run_name, checks)

    with use_machine(second, reuse=reuse):
        print_title("Machine 2: set-up and run in another folder, with nothing of machine 1")
        set_up(second, dataset, checks)
        finish(second, run_name, newest, checks)
        n_eval = sum(read_counts(second)["validation"])
        final = second.workdir / "runs" / run_name

        print_title("What is in the buckets")
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

    print_title("The Slack thread")
    check_slack(checks, slack, restarted, newest, task.envs["SLACK_CHANNEL"])
    print_title("Analysis from S3, on a third machine")
    analyze(folder / "desk", join(trajectories, "runs", run_name), checks)
    left = [*first.list_processes(), *second.list_processes()]
    checks.check(not left, "no process of either machine is left")


@contextmanager
def use_machine(machine: Machine, *, reuse: bool) -> Iterator[None]:
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
    owner = join(bucket.address, OWNER)
    write_object(join(bucket.step_address(LAST_STEP), "policy", "model.safetensors"), b"half")
    print(f"  complete in the bucket: {sorted(bucket.list_complete_steps())}")
    print(f"  put beside them: a part of step {LAST_STEP}, as a cut upload leaves it")
    write_object(owner, name_another_host(read_object(owner)))
    print("  changed: owner.json names another host, as it would after a real machine was lost")
    print("  removed: all files of machine 1")
    return restarted, newest, lost


def name_another_host(record: bytes) -> bytes:
    """The record that the killed process left, as if it had run under another kernel."""
    owner = parse_owner(record)
    assert owner is not None
    changed = owner.model_copy(update={"host": LOST_HOST, "boot_id": LOST_HOST})
    return changed.model_dump_json().encode()


def finish(machine: Machine, run_name: str, newest: int, checks: Checks) -> None:
    checks.check(not (machine.workdir / "runs").exists(), "machine 2 has no run folder")
    command = start(machine, machine.task.run, RUN_NAME="", RESUME_RUN_NAME=run_name)
    end(command, "run", checks)
    output = "\n".join(command.lines)
    checks.check(
        f" on {LOST_HOST}, since" in output,
        "the bucket was taken over from machine 1 after its record had not changed for 40 s",
    )
    resumed = re.search(rf"resuming {run_name} at step (\d+)", output)
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
    output = run_skyfleet(["analyze", address], desk)
    checks.check(all(name in output for name in ENVS), "analyze reads the episodes in S3")
    run_skyfleet(["report", address], desk)
    reports = list(desk.glob("*.html"))
    checks.check(
        bool(reports) and all("<html" in path.read_text() for path in reports),
        f"report writes {', '.join(path.name for path in reports)}",
    )


def start(machine: Machine, script: str, **variables: str) -> Command:
    print(f"  $ {script.strip()}")
    return machine.start(script, show_line, **variables)


def end(command: Command, what: str, checks: Checks) -> None:
    if code := command.wait():
        raise SystemExit(f"loopback: {what} ended with code {code}")
    checks.check(True, f"{what} ended with code 0")


def wait_for_line(command: Command, pattern: str) -> re.Match[str]:
    found: list[re.Match[str]] = []

    def search() -> bool:
        found[:] = [hit for line in list(command.lines) if (hit := re.search(pattern, line))]
        return bool(found)

    wait_until(search, f"the line {pattern!r}", command.process)
    return found[0]


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def read_counts(machine: Machine) -> dict[str, list[int]]:
    manifest = json.loads((machine.workdir / "data/fleet/tool_use/manifest.json").read_text())
    return {
        side: [counts.get(side, 0) for counts in manifest["counts"].values()]
        for side in ("train", "validation")
    }


if __name__ == "__main__":
    main()
