"""Commands of `skyfleet` with faults, forked from a process that has imported everything already.

`python -m benchmarks.soak_child` reads one JSON object per line, a command to run, and writes its
process id and then its exit code. Importing torch takes longer than most of the restarted trainings
live; a forked one starts without it and is the same command otherwise.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: a forked process must not find its threads

import gc
import json
import sys
import threading
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.soak_faults import Faults

SAMPLE_SECONDS = 1.0
PRELOADED = (
    "skyfleet.trainer.assemble",
    "skyfleet.api.training",
    "skyfleet.api.evaluation",
    "skyfleet.engines.embedded",
    "skyfleet.worlds.env",
    "skyfleet.envs.fleet.env",
    "skyfleet.cli.main",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
)


def main() -> None:
    for name in PRELOADED:
        import_module(name)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _run_and_exit(request)
        print(json.dumps({"pid": child}), flush=True)
        _, status = os.waitpid(child, 0)
        print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), flush=True)


def _run_and_exit(request: dict[str, Any]) -> None:
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(request["environ"])
    code = 0
    try:
        faults = Faults(request["rate"], request["seed"], request["burst_left"])
        run_command(request["command"], faults, request)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_command(command: list[str], faults: Faults, request: dict[str, Any]) -> None:
    """`skyfleet COMMAND` in this process; its calls, memory and threads go to `request["log"]`."""
    from skyfleet.cli.main import main as run_skyfleet

    started, ended = time.monotonic(), threading.Event()
    log = open(request["log"], "a")  # noqa: SIM115, it is open as long as the process lives

    def sample() -> None:
        lines = Path("/proc/self/status").read_text().splitlines()
        status = dict(line.split(":", 1) for line in lines)
        row = {
            "seconds": round(time.monotonic() - started, 1),
            "rss_mb": round(int(status["VmRSS"].split()[0]) / 1024, 1),
            "threads": int(status["Threads"]),
            "calls": dict(faults.calls),
            "failures": dict(faults.failures),
            "burst_left": faults.burst_left,
        }
        log.write(json.dumps(row) + "\n")
        log.flush()

    def sample_forever() -> None:
        while not ended.wait(SAMPLE_SECONDS):
            sample()

    if faults.rate:
        faults.install(Path(request["run"]))
    threading.Thread(target=sample_forever, daemon=True).start()
    sys.argv = ["skyfleet", *command]
    try:
        run_skyfleet()
    finally:
        ended.set()
        sample()


if __name__ == "__main__":
    main()
