"""Print what `benchmarks.loopback` does: numbered titles, commands and their output."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path

_NUMBERS = count(1)


def print_title(text: str) -> None:
    print(f"\n== {next(_NUMBERS)}. {text} ==")


def show_line(line: str) -> None:
    print(f"  | {line}")


def run_skyfleet(words: Sequence[str], folder: Path) -> str:
    print(f"  $ skyfleet {' '.join(words)}".replace(f"{folder}/", ""))
    output = run_command([sys.executable, "-m", "skyfleet", *words], folder)
    for line in output.splitlines():
        show_line(line)
    return output


def run_command(words: Sequence[str], folder: Path) -> str:
    variables = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"loopback: {' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout
