"""The script of the README runs as it is, with only the model replaced."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parents[2] / "README.md"
(SCRIPT,) = (
    block
    for block in re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    if "sf.train(" in block
)


@pytest.mark.exhaustive
def test_the_readmes_script_runs_with_only_the_model_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    script, n_replaced = re.subn(r'"Qwen/Qwen3-0.6B"', '"tiny"', SCRIPT)
    assert n_replaced == 1
    names: dict[str, Any] = {}
    exec(compile(script, README.name, "exec"), names)
    printed = capsys.readouterr().out
    assert "| val | env " in printed
    assert "[user] Press the button" in printed
