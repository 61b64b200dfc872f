"""Intervals hold and verdicts are false as often as docs/evaluation.md says; a small benchmark."""

from __future__ import annotations

import pytest
from benchmarks.intervals import (
    BANDS,
    difference_holds,
    false_alarm,
    false_alarm_anywhere,
    one_report_holds,
    share,
)

MIDDLE = BANDS["0.1 to 0.9"]


@pytest.mark.parametrize(("n_tasks", "attempts"), [(50, 1), (200, 1), (50, 4), (100, 8)])
def test_the_interval_of_a_report_holds_94_to_96_percent_of_the_time(
    n_tasks: int, attempts: int
) -> None:
    trials = 4000 if attempts == 1 else 800
    assert 0.94 <= share(one_report_holds, MIDDLE, n_tasks, attempts, trials=trials) <= 0.96


@pytest.mark.parametrize(("n_tasks", "attempts"), [(50, 1), (200, 1), (100, 2), (50, 4), (100, 8)])
def test_the_interval_of_a_difference_holds_94_to_96_percent_of_the_time(
    n_tasks: int, attempts: int
) -> None:
    assert 0.94 <= share(difference_holds, MIDDLE, n_tasks, attempts, trials=4000) <= 0.96


@pytest.mark.parametrize("attempts", [1, 4])
def test_no_change_is_called_one_in_at_most_five_percent(attempts: int) -> None:
    assert 0.02 <= share(false_alarm, MIDDLE, 60, attempts, trials=1000) <= 0.05
    assert share(false_alarm_anywhere, MIDDLE, 60, attempts, trials=1000) <= 0.05
