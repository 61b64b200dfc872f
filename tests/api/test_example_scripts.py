"""The scripts in examples/ that show the Python API run with the tiny model."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["press_the_button.py", "open_the_safe.py"])
def test_the_script_runs(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, "tiny", "1"])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert "pass@1 before" in capsys.readouterr().out
