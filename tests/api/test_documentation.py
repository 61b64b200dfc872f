"""Every public name has an example that runs, and so does every Python block of the API's page."""

from __future__ import annotations

import doctest
import os
import re
import webbrowser
from pathlib import Path
from typing import Any

import pytest

import skyfleet as sf

PAGE = Path(__file__).parents[2] / "docs" / "python_api.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)

SMALL = (
    (r'"Qwen/Qwen3-0.6B"', '"tiny"'),
    (r"\bsteps=\d+", "steps=1"),
    (r"\beval_every=\d+", "eval_every=1"),
    (r"\bbatch_size=\d+", "batch_size=2"),
    (r"\bgroup_size=\d+", "group_size=2"),
    (r"\bmax_tokens=\d+", "max_tokens=4"),
    (r"\bport=8000", "port=0"),
)
"""The model becomes tiny, and the numbers small."""


class _IgnoreProgress(doctest.OutputChecker):
    """Training prints its progress; an example without an expected output may print."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    return tmp_path


@pytest.mark.parametrize("name", sf.__all__)
def test_the_example_of_a_public_name_runs(name: str, in_folder: Path) -> None:
    finder = doctest.DocTestFinder(recurse=False)
    tests = finder.find(getattr(sf, name), name, module=False, globs={})
    examples = [test for test in tests if test.examples]
    assert examples, f"the docstring of sf.{name} has no example"
    flags = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    runner = doctest.DocTestRunner(_IgnoreProgress(), verbose=False, optionflags=flags)
    for test in examples:
        runner.run(test)
    assert runner.failures == 0


def test_the_package_has_an_example_that_runs() -> None:
    assert doctest.testmod(sf).failed == 0


@pytest.mark.slow
def test_every_block_of_the_page_runs_with_the_tiny_model(
    in_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    names: dict[str, Any] = {}
    for number, block in enumerate(BLOCKS):
        exec(compile(shrink(block), f"{PAGE.name} block {number}", "exec"), names)
    printed = capsys.readouterr().out
    assert "| held_out | " in printed
    assert "| unseen | notes" in printed
    assert "<lambda> takes (task, x); it may take task, answer, messages, trajectory" in printed
    assert len(opened) == 2
    assert os.path.exists("runs/notes/config.yaml")


def shrink(block: str) -> str:
    for pattern, small in SMALL:
        block = re.sub(pattern, small, block)
    return block
