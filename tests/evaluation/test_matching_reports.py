"""Paths name reports: a file, a folder, or a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.trajectories.making import group

from skyfleet.errors import ConfigError
from skyfleet.evaluation.report import EvalReport, Matched, match_reports


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (0, 20, 100):
        for name in ("near", "far"):
            keep(tmp_path / "run" / "reports" / f"step_{step:06d}", name, step)
    return tmp_path / "run"


def keep(folder: Path, name: str, step: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(EvalReport.of(name, [group([1.0])], step=step).to_json())
    return path


def steps(matched: Matched) -> list[tuple[str, int, int]]:
    return [(before.name, before.step, after.step) for before, after in matched.pairs]


def test_a_run_alone_is_its_first_step_against_its_last(run: Path) -> None:
    assert steps(match_reports(run, None)) == [("far", 0, 100), ("near", 0, 100)]
    assert steps(match_reports(run, None, step=20)) == [("far", 0, 20), ("near", 0, 20)]


def test_of_two_runs_the_last_steps_are_compared(run: Path, tmp_path: Path) -> None:
    keep(tmp_path / "other" / "reports" / "step_000020", "near", 20)
    matched = match_reports(run, tmp_path / "other")
    assert steps(matched) == [("near", 100, 20)]
    assert matched.unmatched == ("far",)
    assert steps(match_reports(run, tmp_path / "other", step=20)) == [("near", 20, 20)]


def test_folders_and_files_of_reports_are_read(run: Path) -> None:
    first = run / "reports" / "step_000000"
    assert steps(match_reports(first, run)) == [("far", 0, 100), ("near", 0, 100)]
    assert steps(match_reports(first / "near.json", run)) == [("near", 0, 100)]
    # Two files are compared whatever their sets are called.
    assert steps(match_reports(first / "near.json", first / "far.json")) == [("near", 0, 0)]


@pytest.mark.parametrize(
    ("before", "after", "step", "sentence"),
    [
        ("run/reports/step_000000", "lone", 7, "--step 7 is of a run folder, and neither"),
        ("run", None, 7, r"--step 7: .*run was evaluated at \[0, 20, 100\]"),
        ("run/reports/step_000000", None, None, "has reports of 0 steps, and a comparison needs"),
        ("run", "run/reports", None, "holds no report"),
        ("run/reports/step_000000/near.json", "lone", None, "no set in common"),
        ("bad.json", "run", None, "bad.json is no report: "),
    ],
)
def test_what_names_no_report_is_refused(
    run: Path, tmp_path: Path, before: str, after: str | None, step: int | None, sentence: str
) -> None:
    keep(tmp_path / "lone", "alone", 0)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ConfigError, match=sentence):
        match_reports(tmp_path / before, tmp_path / after if after else None, step=step)
