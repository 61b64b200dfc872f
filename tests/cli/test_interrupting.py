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
import {module} as module
from skyfleet.cli.main import main

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
module.{function} = lambda *_, **__: {when}()
main()
"""


CODES = {"in_an_episode": 130, "in_an_import": 130, "at_exit": -2}
"""A shell reports -2 as 130, too."""
REPLACED = {
    "train": ("skyfleet.trainer.training_run", "run_training"),
    "evaluate": ("skyfleet.cli.evaluate", "_evaluate"),
}


@pytest.mark.parametrize(
    ("command", "when"),
    [
        ("evaluate --agent null", "in_an_episode"),
        ("evaluate --agent null", "in_an_import"),
        ("evaluate --agent null", "at_exit"),
        # They import torch, and the code that catches the second Ctrl-C is that of `evaluate`.
        pytest.param("train", "in_an_episode", marks=pytest.mark.exhaustive),
        pytest.param("train", "in_an_import", marks=pytest.mark.exhaustive),
        pytest.param("train", "at_exit", marks=pytest.mark.exhaustive),
    ],
)
def test_a_second_ctrl_c_ends_with_one_message(command: str, when: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(SETTINGS)
    name, *options = command.split()
    module, function = REPLACED[name]
    script = PRESSED.format(when=when, module=module, function=function)
    line = [sys.executable, "-c", script, name, *options, str(file)]
    ended = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path)
    assert ended.stderr == ""
    assert ended.stdout.startswith("\nInterrupted")
    assert len(ended.stdout.splitlines()) == 2
    assert ended.returncode == CODES[when]
