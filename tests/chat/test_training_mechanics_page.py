"""docs/training_mechanics.md: its example runs and prints what the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from skyfleet.algorithms.reduction import build_reduction
from skyfleet.chat.tool_calls.formats import FORMATS

PAGE = (Path(__file__).parents[2] / "docs" / "training_mechanics.md").read_text()


def test_the_example_prints_what_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    found = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    code, output = found.groups()
    exec(compile(code, "training_mechanics.md", "exec"), {})
    assert capsys.readouterr().out == output


def test_the_page_lists_every_tool_call_format() -> None:
    table = PAGE.partition("### Tool-call formats")[2].partition("Parsers add")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])} == {
        *FORMATS
    }


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("token_mean", [1 / 4, 1 / 4]),
        ("sequence_mean", [1 / 2, 1 / 6]),
        ("seq_mean_token_sum_norm", [1 / 20, 1 / 20]),
        ("prompt_mean", [1 / 4, 1 / 4]),
        ("token_mean_legacy", [1 / 2, 1 / 6]),
    ],
)
def test_the_weights_of_the_page_are_those_of_the_code(name: str, weights: list[float]) -> None:
    assert f"| `{name}`" in PAGE
    assert build_reduction(name, max_seq_len=10)([1, 3], "aa") == pytest.approx(weights)
