"""Ctrl-C, the death of the background loop, or a fork in it, while a sync call waits for it."""

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


CLOSED = """
import asyncio, os
from skyfleet.api.background import BackgroundLoopError, run_sync

async def close_descriptors():
    os.closerange(3, 200)
    await asyncio.sleep(60)

try:
    run_sync(close_descriptors())
except BackgroundLoopError as error:
    print(error)
print(run_sync(asyncio.sleep(0, "a new loop")))
"""


def test_a_call_whose_event_loop_died_says_why_and_the_next_one_gets_another() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CLOSED], capture_output=True, text=True, timeout=50, check=False
    )
    error, value = done.stdout.splitlines()
    assert "died (OSError: [Errno 9] Bad file descriptor)" in error
    assert "environment.isolation=process" in error
    assert value == "a new loop"
    assert done.stderr == ""


FORKED = """
import asyncio, os
from skyfleet.api.background import run_sync
from skyfleet.envs.env_thread import EnvThread

def fork():
    child = os.fork()
    if child:
        print(os.waitpid(child, 0)[1], flush=True)
    return "parent" if child else "child"

async def fork_in_loop():
    return fork()

async def fork_in_thread():
    return await EnvThread("env", asyncio.Semaphore(1)).call(fork)

print(run_sync(fork_in_loop()), flush=True)
print(run_sync(fork_in_thread()))
"""


def test_a_forked_process_that_returns_into_skyfleet_ends() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.stdout == "0\nparent\n" * 2, done.stderr
