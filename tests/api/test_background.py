"""Ctrl-C while a sync call waits for the background loop."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import asyncio, os, signal, threading, time
from skyfleet.api.background import background_loop, run_sync

background_loop()  # its thread does not block the signal and takes it
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    run_sync(asyncio.sleep(60))
except KeyboardInterrupt:
    print("cancelled")
"""


def test_ctrl_c_is_noticed_when_the_kernel_gives_it_to_another_thread() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.stdout == "cancelled\n", done.stderr
