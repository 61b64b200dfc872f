"""A run in a process of its own: its error in one sentence, and signals that reach it."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from tests.sweeps.scripted_runs import plan_small, write_config

from skyfleet.sweeps.execution import RunFailedError
from skyfleet.sweeps.local_process import LocalRunner, SweepInterruptedError, log_path
from skyfleet.sweeps.plan import SweepRun


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepRun:
    write_config(tmp_path, monkeypatch)
    return plan_small().runs[0]


def start(run: SweepRun, script: str) -> str:
    command = (sys.executable, "-c", script)
    return LocalRunner(config_name="small.yaml", report=lambda _: None, command=command)(run)


def test_the_process_gets_the_configuration_and_the_overrides_of_its_run(run: SweepRun) -> None:
    assert start(run, "import sys; print(sys.argv[1:])") == "finished"
    printed = log_path(run).read_text()
    assert printed.startswith("['small.yaml', 'data.val_data=")
    assert f"'trainer.run_path=runs/small-seeds/{run.name}'" in printed
    assert "'trainer.seed=42'" in printed


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        (
            "import sys; print('skyfleet: trainer.lr=0; raise it', file=sys.stderr); print('x'); "
            "sys.exit(2)",
            r"^exit code 2: trainer.lr=0; raise it \(log: runs/small-seeds/",
        ),
        ("raise ValueError('a b')", r"^exit code 1: ValueError: a b"),
        ("import sys; sys.exit(3)", r"^exit code 3: no output"),
        ("import os; os.kill(os.getpid(), 9)", r"^killed by SIGKILL"),
    ],
)
def test_a_failure_is_the_last_sentence_of_this_attempt(
    run: SweepRun, script: str, sentence: str
) -> None:
    log_path(run).parent.mkdir(parents=True)
    log_path(run).write_text("skyfleet: an error of the attempt before\n")
    with pytest.raises(RunFailedError, match=sentence):
        start(run, script)


def test_a_secret_in_the_log_is_not_in_the_error(run: SweepRun) -> None:
    with pytest.raises(RunFailedError) as caught:
        start(run, "raise SystemExit('skyfleet: https://me:pa55word@host/x failed')")
    assert "pa55word" not in str(caught.value)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_run_and_then_ends_the_sweep(
    run: SweepRun, number: signal.Signals
) -> None:
    """The process sends the signal to the sweep, waits until it is forwarded, and ends by itself."""
    script = (
        "import os, signal\n"
        f"number = signal.Signals({int(number)})\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [number])\n"
        "os.kill(os.getppid(), number)\n"
        "signal.sigwait([number])\n"
        "print('saved', flush=True)\n"
    )
    before = signal.getsignal(number)
    with pytest.raises(SweepInterruptedError) as caught:
        start(run, script)
    assert caught.value.sent is number
    assert log_path(run).read_text() == "saved\n"
    assert signal.getsignal(number) is before
