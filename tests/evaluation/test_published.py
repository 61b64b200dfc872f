"""Published percentages are compared as independent samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyfleet.errors import ConfigError
from skyfleet.evaluation.compare import Verdict
from skyfleet.evaluation.published import read_published
from skyfleet.evaluation.table import conclude

PUBLISHED = Path(__file__).parents[2] / "examples" / "published_rates.yaml"


def test_the_published_table_shows_no_significant_change() -> None:
    comparison = read_published(PUBLISHED)
    overall = comparison.overall
    assert (overall.n_tasks, overall.before, overall.after) == (116, 50 / 116, 59 / 116)
    assert overall.p_value == pytest.approx(0.2926, abs=1e-4)
    assert overall.interval == pytest.approx((-0.050, 0.202), abs=1e-3)
    assert overall.detectable == pytest.approx(0.182, abs=1e-3)
    assert overall.tasks_needed == 652
    assert {change.verdict for change in comparison.by_env.values()} == {Verdict.UNDERPOWERED}
    github = comparison.by_env["github"]
    assert github.p_value == pytest.approx(0.1154, abs=1e-4)
    assert github.corrected_p_value == pytest.approx(4 * 0.11537, abs=1e-4)
    assert conclude(comparison) == (
        "published_rates: No environment changed significantly. Overall +7.8 points on 116 "
        "tasks, p = 0.29: these tasks detect a true change of 18.2 points or more; the observed "
        "one would need 652 tasks."
    )


def test_large_changes_get_a_verdict(tmp_path: Path) -> None:
    table = tmp_path / "rates.csv"
    table.write_text("env,n,before_percent,after_percent\na,200,10,30\nb,200,60,40\nc,50,96,98\n")
    comparison = read_published(table)
    assert [change.verdict for change in comparison.by_env.values()] == [
        Verdict.IMPROVED,
        Verdict.REGRESSED,
        Verdict.SATURATED,
    ]
    assert "IMPROVED: a. REGRESSED: b. Overall +0.2 points on 450 tasks" in conclude(comparison)


@pytest.mark.parametrize(
    ("row", "before"),
    [
        ("8,12,25", 1),
        ("8,13,25", 1),  # 12.5 rounded up
        ("8,12.5,25", 1),
        ("3,33.333,66.667", 1),
        ("30,46.7%,70.0 %", 14),
        ("7,14.29,28.57", 1),
    ],
)
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_rounded_percentages_with_or_without_a_sign_are_accepted(
    tmp_path: Path, row: str, before: int, mark: str
) -> None:
    table = tmp_path / "rates.csv"
    table.write_text(f"{mark}env,n,before_percent,after_percent\na,{row}\n", encoding="utf-8")
    change = read_published(table).by_env["a"]
    assert round(change.before * change.n_tasks) == before


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("- {env: a, n: 29, before_percent: 46.7, after_percent: 50}", "46.7 % of n=29 is not"),
        (
            "- {env: a, n: 8, before_percent: 13.0, after_percent: 50}",
            "13.0 % of n=8 is not a whole",
        ),
        ("- {env: a, n: 10, before_percent: nan, after_percent: 50}", "0.before_percent: Input"),
        ("- {env: a, n: 10, before_percent: 50}", "0.after_percent: Field required"),
        ("- {env: a, n: 10, before_percent: 50, after_percent: 120}", "0.after_percent: Input"),
        ("env: a", "table: Input should be a valid list"),
        ("[]", "has no rows"),
        ("- {env: [", "is not a table"),
        ("- &r {env: a, n: 10, before_percent: 50, after_percent: 50}\n- *r", "'a' appears twice"),
    ],
)
def test_an_invalid_table_raises(tmp_path: Path, text: str, sentence: str) -> None:
    table = tmp_path / "rates.yaml"
    table.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_published(table)
    assert sentence in str(caught.value)
    assert "rates.yaml" in str(caught.value)
