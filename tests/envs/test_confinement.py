"""Without a sandbox, verifiers of others run only if the configuration allows it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.fakes.jails import BWRAP, GOOD, NO_BWRAP

from skyfleet.config.loading import load_config
from skyfleet.envs.verifiers import seccomp
from skyfleet.envs.verifiers.confinement import (
    Confinement,
    UnconfinedVerifierError,
    check_verifiers,
    probe_confinement,
)
from skyfleet.tasks.loading import write_tasks
from skyfleet.tasks.task import Task
from skyfleet.worlds.catalog import generate_world_tasks

REPO = Path(__file__).parents[2]
UNCONFINED = [sys.executable, "-m", "tests.fakes.unconfined", sys.executable, "-c"]

pytestmark = pytest.mark.skipif(not seccomp.SUPPORTED, reason="the filter is for Linux on x86_64")


def _run_unconfined(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run under a kernel that refuses system call filters and namespaces."""
    path = os.pathsep.join([str(REPO / "src"), str(REPO)])
    return subprocess.run(
        [*UNCONFINED, program, *arguments],
        capture_output=True,
        text=True,
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": path},
    )


def test_the_filter_works_on_a_machine_that_runs_these_tests() -> None:
    found = probe_confinement(NO_BWRAP)
    assert (found.bwrap, found.has_filter, found.is_missing) == (None, True, False)
    assert "is not installed" in found.bwrap_problem
    found.require()


@BWRAP
def test_bubblewrap_is_tried_and_not_only_looked_for(tmp_path: Path) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2; exit 1")
    broken.chmod(0o755)
    assert probe_confinement().bwrap is not None
    assert probe_confinement(str(broken)).bwrap is None
    assert "setting up uid map" in probe_confinement(str(broken)).bwrap_problem


@pytest.mark.parametrize(
    ("bwrap", "has_filter", "runs"),
    [("/bin/bwrap", False, True), (None, True, True), (None, False, False)],
)
def test_one_of_the_two_is_enough(bwrap: str | None, has_filter: bool, runs: bool) -> None:
    found = Confinement(
        bwrap=bwrap, bwrap_problem="no program", has_filter=has_filter, filter_problem="no kernel"
    )
    if runs:
        found.require()
    else:
        key = r"environment\.verifier\.allow_unconfined=false.*no program.*no kernel.*apt install"
        with pytest.raises(UnconfinedVerifierError, match=key):
            found.require()


JAILS = f"""
import asyncio
from skyfleet.envs.verifiers.jail import Jail
for allow in (False, True):
    with Jail(n_workers=1, allow_unconfined=allow) as jail:
        try:
            print(asyncio.run(jail.verify({GOOD!r}, b"", b"", None)).reward)
        except Exception as error:
            print(type(error).__name__, error)
"""


def test_a_jail_without_walls_runs_nothing_unless_allowed() -> None:
    ended = _run_unconfined(JAILS)
    refused, graded = ended.stdout.splitlines()
    assert refused.startswith("UnconfinedVerifierError environment.verifier.allow_unconfined=false")
    assert "prctl(22): Operation not permitted" in refused
    assert graded == "1.0"
    assert "VERIFIERS RUN OUTSIDE A SANDBOX" in ended.stderr


CLI = "import sys; from skyfleet.cli.main import main; sys.exit(main())"


@pytest.mark.parametrize(
    "command",
    [
        "validate",
        "validate --dry-run",
        pytest.param("train --dry-run", marks=pytest.mark.exhaustive),
    ],
)
def test_commands_refuse_before_they_start(tmp_path: Path, command: str) -> None:
    tasks = generate_world_tasks("github", split="all", count=2)
    foreign = [
        task.model_copy(update={"verifier_code": f"{task.verifier_code}# from a file"})
        for task in tasks
    ]
    write_tasks(tmp_path / "tasks.jsonl", foreign)
    name, *options = command.split()
    arguments = {
        "validate": ["tasks", "validate", f"{tmp_path}/tasks.jsonl"],
        "train": [
            *("train", "tiny", f"data.train_data=[{tmp_path}/tasks.jsonl]"),
            *("data.allow_unmanifested=true", "data.val_data=null", "trainer.train_batch_size=2"),
            *("trainer.policy_mini_batch_size=2", f"trainer.ckpt_path={tmp_path}/checkpoints"),
        ],
    }[name]
    ended = _run_unconfined(CLI, *arguments, *options)
    (line,) = [line for line in ended.stderr.splitlines() if "allow_unconfined" in line]
    assert line.startswith("skyfleet: environment.verifier.allow_unconfined=false, and nothing")
    assert ended.returncode == 2


@pytest.mark.parametrize(
    ("settings", "code", "is_checked"),
    [
        ([], "def verify(env): return 1", True),
        ([], None, False),
        (["environment.env_class=fleet_task"], GOOD, False),
        (["environment.env_class=mcp"], GOOD, False),
        (["environment.verifier.allow_unconfined=true"], GOOD, False),
    ],
)
def test_only_source_that_would_run_here_needs_a_sandbox(
    monkeypatch: pytest.MonkeyPatch, settings: list[str], code: str | None, is_checked: bool
) -> None:
    (task,) = generate_world_tasks("github", split="all", count=1)
    probed: list[object] = []

    def probe() -> Confinement:
        probed.append(task)
        return probe_confinement(NO_BWRAP)

    monkeypatch.setattr("skyfleet.envs.verifiers.confinement.probe_confinement", probe)
    tasks: list[Task] = [task, task.model_copy(update={"verifier_code": code})]
    check_verifiers(load_config("", settings), tasks)
    assert bool(probed) == is_checked
