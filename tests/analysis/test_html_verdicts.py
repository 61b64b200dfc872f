"""The table of verdicts explains apparent contradictions."""

from __future__ import annotations

from pathlib import Path

from tests.analysis.report_runs import add_evaluation, empty_run
from tests.trajectories.making import group

from skyfleet.analysis.html.page import build_report_page

WHY = "Some intervals exclude 0 without a significant change: the test"


def page_of(folder: Path, gained: int, lost: int) -> str:
    """The page of a run with forty tasks and these changes."""
    same = [0.0] * (40 - gained - lost)
    sides = ([0.0] * gained + [1.0] * lost + same, [1.0] * gained + [0.0] * lost + same)
    run = empty_run(folder)
    for step, rewards in enumerate(sides):
        tried = [group([reward], task_key=f"t{n}") for n, reward in enumerate(rewards)]
        add_evaluation(run, "unseen", step, tried)
    return build_report_page([run])


def test_a_conflict_between_interval_and_verdict_is_explained(tmp_path: Path) -> None:
    assert WHY in page_of(tmp_path / "odd", gained=7, lost=1)
    assert WHY not in page_of(tmp_path / "clear", gained=10, lost=0)
