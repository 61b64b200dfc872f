"""Jail workers are replaced when they fail, are not shared, and end with the jail."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.fakes.jails import (
    BWRAP,
    GOOD,
    KINDS,
    NO_BWRAP,
    at_work,
    gone,
    open_files,
    processes_of,
    verifier,
    verify,
)

from skyfleet.envs.verifiers import jail as jail_module
from skyfleet.envs.verifiers.jail import Jail
from skyfleet.envs.verifiers.jail_process import JailProcess
from skyfleet.errors import VerifierError
from skyfleet.tasks.task import Grade


@pytest.fixture(params=KINDS)
def jail(request: pytest.FixtureRequest) -> Iterator[Jail]:
    with Jail(n_workers=1, bwrap=request.param) as jail:
        yield jail


async def test_many_at_once_each_get_their_own_grade() -> None:
    wild = {3: "import os; os._exit(1)", 7: "while True: pass", 11: "b'x' * 2**32"}
    with Jail(n_workers=2) as jail:
        verdicts = await asyncio.gather(
            *(verify(jail, verifier(wild.get(n, f"return {n}")), 0.5) for n in range(16)),
            return_exceptions=True,
        )
        assert len(jail.pids) == 2
    unknown = {n for n, verdict in enumerate(verdicts) if isinstance(verdict, VerifierError)}
    assert unknown == set(wild)
    rewards = {n: v.reward for n, v in enumerate(verdicts) if isinstance(v, Grade)}
    assert rewards == {n: float(n) for n in range(16) if n not in wild}


async def test_a_worker_killed_while_idle_is_replaced(jail: Jail) -> None:
    await verify(jail, GOOD)
    (pid,) = jail.pids
    os.kill(pid, signal.SIGKILL)
    assert await gone([pid])
    assert (await verify(jail, GOOD)).success
    assert jail.pids != [pid]


async def test_a_worker_killed_at_work_makes_one_grade_unknown() -> None:
    with Jail(n_workers=2) as jail:
        task = await at_work(jail)
        (pid,) = jail.pids
        other = asyncio.create_task(verify(jail, verifier("import time; time.sleep(0.3)")))
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(VerifierError, match="worker failed"):
            await task
        assert (await other).success
        assert pid not in jail.pids


async def test_a_worker_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jail_module, "_GRACE_SECONDS", 0.2)
    with Jail(n_workers=1, bwrap=NO_BWRAP) as jail:
        await verify(jail, GOOD)
        os.kill(jail.pids[0], signal.SIGSTOP)
        with pytest.raises(VerifierError, match=r"no answer within 0\.3 s"):
            await verify(jail, GOOD, timeout_seconds=0.1)
        monkeypatch.undo()
        assert (await verify(jail, GOOD)).success


async def test_a_verification_that_is_given_up_does_not_answer_the_next(jail: Jail) -> None:
    task = await at_work(jail)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await verify(jail, verifier("return 0.75"))).reward == 0.75


@pytest.mark.parametrize(
    ("says", "complaint"), [(b"\xff" * 8, "announces"), (b"\0", "has ended"), (b"", "has ended")]
)
async def test_an_invalid_reply_of_a_worker_is_rejected(says: bytes, complaint: str) -> None:
    program = f"import os; os.read(0, 99); os.write(0, {says!r})"
    with ExitStack() as at_end:
        worker = JailProcess([sys.executable, "-I", "-S", "-c", program])
        at_end.callback(worker.end)
        with pytest.raises(ConnectionError, match=complaint):
            await worker.ask(b"anything", timeout_seconds=20)


def test_a_jail_outlives_the_loop_it_was_used_in(jail: Jail) -> None:
    pids = []
    for _ in range(2):
        assert asyncio.run(verify(jail, GOOD)).success
        pids.append(jail.pids)
    assert pids[0] == pids[1]

    asyncio.run(_leave_in_the_middle(jail))
    assert jail.pids == []
    assert asyncio.run(verify(jail, GOOD)).success


async def _leave_in_the_middle(jail: Jail) -> None:
    await at_work(jail)


async def test_nothing_is_left_when_it_closes(jail: Jail) -> None:
    threads, files = threading.enumerate(), open_files()
    with pytest.raises(VerifierError, match="longer than"):
        await verify(jail, verifier("while True: pass"), 0.1)
    task = await at_work(jail)
    started = processes_of(jail.pids)
    assert len(started) >= 2
    jail.close()
    with pytest.raises(VerifierError, match="worker failed"):
        await task
    assert await gone(started)
    assert jail.pids == []
    with pytest.raises(VerifierError, match="the jail is closed"):
        await verify(jail, GOOD)
    assert threading.enumerate() == threads
    assert open_files() == files


def test_a_forked_process_leaves_the_workers_alone(jail: Jail) -> None:
    asyncio.run(verify(jail, GOOD))
    pids = jail.pids
    child = os.fork()
    if child == 0:
        jail.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert asyncio.run(verify(jail, GOOD)).success
    assert jail.pids == pids


def test_a_run_that_is_killed_leaves_no_worker() -> None:
    program = f"""
import asyncio, signal
from tests.fakes.jails import at_work, processes_of
from skyfleet.envs.verifiers.jail import Jail
async def main():
    jails = [Jail(n_workers=1, bwrap=bwrap) for bwrap in {["bwrap", NO_BWRAP]!r}]
    for jail in jails:
        await at_work(jail)
    print(*(pid for jail in jails for pid in processes_of(jail.pids)), flush=True)
    signal.raise_signal(signal.SIGKILL)
asyncio.run(main())
"""
    killed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len(killed.stdout.split()) >= 4
    assert asyncio.run(gone(map(int, killed.stdout.split())))


async def test_without_bubblewrap_there_is_one_loud_warning(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    refuses = _script(tmp_path, "echo 'bwrap: No permissions to create namespace' >&2; exit 1")
    for bwrap, reason in ((refuses, "No permissions"), (NO_BWRAP, "is not installed")):
        caplog.clear()
        with Jail(n_workers=2, bwrap=bwrap) as jail:
            grades = await asyncio.gather(*(verify(jail, GOOD) for _ in range(4)))
        assert all(grade.success for grade in grades)
        (record,) = [one for one in caplog.records if "bubblewrap" in one.message]
        assert reason in record.message


@BWRAP
async def test_a_sandbox_that_worked_once_is_never_skipped(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    bwrap = _script(tmp_path, f'[ -e {broken} ] && exit 1; exec {shutil.which("bwrap")} "$@"')
    with Jail(n_workers=1, bwrap=bwrap) as jail:
        assert (await verify(jail, GOOD)).success
        broken.touch()
        os.kill(jail.pids[0], signal.SIGKILL)
        assert await gone(jail.pids)
        with pytest.raises(VerifierError, match="cannot start a worker"):
            await verify(jail, GOOD)
        broken.unlink()
        assert (await verify(jail, GOOD)).success


def _script(folder: Path, line: str) -> str:
    script = folder / "bwrap"
    script.write_text(f"#!/bin/sh\n{line}\n")
    script.chmod(0o755)
    return str(script)
