"""Repeated Ctrl-C ends a command with one message and no traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.fakes.small_runs import SETTINGS

# Background jobs of a shell and their children ignore SIGINT.
PRESSED = """
import asyncio, atexit, signal
from skyfleet.cli import evaluate
from skyfleet.cli.main import main
from skyfleet.trainer import training_run

class Field:
    def __set_name__(self, *_):  # Python 3.11 turns an exception raised here into a RuntimeError
        press()

def press():
    signal.raise_signal(signal.SIGINT)

async def in_an_episode():
    async with asyncio.TaskGroup() as episodes:
        episodes.create_task(press_twice())
        episodes.create_task(asyncio.sleep(60))

async def press_twice():
    press()
    press()

async def in_an_import():
    press()
    class Imported:
        field = Field()

async def at_exit():
    atexit.register(press)
    press()
    await asyncio.sleep(60)

signal.signal(signal.SIGINT, signal.default_int_handler)
training_run.run_training = evaluate._evaluate = lambda *_, **__: {when}()
main()
"""


@pytest.mark.parametrize("args", [["train"], ["evaluate", "--agent", "null"]])
@pytest.mark.parametrize(
    ("when", "code"),
    [
        ("in_an_episode", 130),
        ("in_an_import", 130),
        ("at_exit", -2),  # a shell reports this as 130, too
    ],
)
def test_a_second_ctrl_c_ends_with_one_message(
    args: list[str], when: str, code: int, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(SETTINGS)
    command = [sys.executable, "-c", PRESSED.format(when=when), *args, str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert ended.stderr == ""
    assert ended.stdout.startswith("\nInterrupted")
    assert len(ended.stdout.splitlines()) == 2
    assert ended.returncode == code
