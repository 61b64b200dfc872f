"""A run of a sweep on this machine: `skyfleet train` in a process of its own.

So that a run that is killed for its memory, or breaks the GPU's context, ends alone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from skyfleet.errors import ConfigError
from skyfleet.redaction import redact
from skyfleet.storage.folder_lock import check_not_in_use
from skyfleet.sweeps.execution import Report, RunFailedError
from skyfleet.sweeps.plan import SweepRun
from skyfleet.sweeps.record import State
from skyfleet.terminal import sanitize

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_TAIL_BYTES = 64_000
_POLL_SECONDS = 1.0
MAX_WAIT_SECONDS = 600.0
"""For the process of a killed sweep to save its checkpoint."""


class SweepInterruptedError(Exception):
    """The sweep got a signal; its run has saved a checkpoint."""

    def __init__(self, sent: signal.Signals) -> None:
        self.sent = sent


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRunner:
    config_name: str
    report: Report
    command: tuple[str, ...] = (sys.executable, "-m", "skyfleet.cli.main", "train")

    def __call__(self, run: SweepRun) -> State:
        _wait_until_free(run.folder, self.report)
        log = log_path(run)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            began = log.stat().st_size
            arguments = [*self.command, self.config_name, *run.local_overrides]
            code = _run_forwarding_signals(arguments, output.fileno())
        if code != 0:
            raise RunFailedError(f"{_describe_end(code, log, began)} (log: {log})")
        return "finished"


def log_path(run: SweepRun) -> Path:
    """Beside the run's folder, which must only hold what a run writes."""
    return run.folder.with_name(f"{run.name}.log")


def _run_forwarding_signals(arguments: Sequence[str], output: int) -> int:
    """The exit code. Ctrl-C and SIGTERM reach the process once each time, and end the sweep after it."""
    received: list[signal.Signals] = []
    process: list[subprocess.Popen[bytes]] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        received.append(signal.Signals(number))
        for running in process:
            running.send_signal(number)

    with _handling(forward):
        # A session of its own: a terminal's Ctrl-C reaches it through `forward` only.
        process.append(
            subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=_build_death_signal(),
            )
        )
        if received:  # before the process was there
            process[0].send_signal(received[0])
        code = process[0].wait()
    if received:
        raise SweepInterruptedError(received[0])
    return code


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in _FORWARDED}
    kept = [number for number, action in before.items() if action is not signal.SIG_IGN]
    for number in kept:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in kept:
            signal.signal(number, before[number])


def _build_death_signal() -> Callable[[], None] | None:
    """On Linux, a run whose sweep is killed gets SIGTERM, saves its checkpoint and ends."""
    if not sys.platform.startswith("linux"):
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def ask_for_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it was killed meanwhile
            os._exit(1)

    return ask_for_signal


def _wait_until_free(folder: Path, report: Report) -> None:
    """The process of a sweep that was killed may still save its checkpoint."""
    end = time.monotonic() + MAX_WAIT_SECONDS
    waited = False
    while True:
        try:
            check_not_in_use(folder)
            return
        except ConfigError as error:
            if time.monotonic() > end:
                raise RunFailedError(str(error)) from None
            if not waited:
                report(f"{folder} is in use; waiting until its process has saved its checkpoint")
            waited = True
            time.sleep(_POLL_SECONDS)


def _describe_end(code: int, log: Path, began: int) -> str:
    """The last sentence of the log, or how the process was killed."""
    with log.open("rb") as file:
        file.seek(max(began, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = file.read().decode("utf-8", "backslashreplace").splitlines()
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    sentences = [line for line in lines if line.startswith("skyfleet: ")]
    last = sentences or [line for line in lines if line.strip()]
    text = last[-1].removeprefix("skyfleet: ") if last else "no output"
    return f"exit code {code}: {sanitize(redact(text), at_most=500)}"
