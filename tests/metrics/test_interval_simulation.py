"""Intervals hold and verdicts are false as often as docs/evaluation.md says; a small benchmark."""

from __future__ import annotations

import pytest
from benchmarks.intervals import (
    Simulation,
    difference_holds,
    difference_of_flips_holds,
    false_alarm,
    false_alarm_anywhere,
    false_alarm_of_half,
    false_alarm_of_one,
    one_report_holds,
    report_of_flips_holds,
    share,
)

MIDDLE = (0.1, 0.9)
HIGH = (0.95, 0.95)


@pytest.mark.parametrize(("n_tasks", "attempts"), [(50, 1), (200, 1), (50, 4), (100, 8)])
def test_the_interval_of_a_report_holds_94_to_97_percent_of_the_time(
    n_tasks: int, attempts: int
) -> None:
    assert 0.94 <= share(one_report_holds, MIDDLE, n_tasks, attempts, trials=4000) <= 0.97


@pytest.mark.parametrize(("n_tasks", "attempts"), [(50, 1), (200, 1), (100, 2), (50, 4), (100, 8)])
def test_the_interval_of_a_difference_holds_94_to_98_percent_of_the_time(
    n_tasks: int, attempts: int
) -> None:
    assert 0.94 <= share(difference_holds, MIDDLE, n_tasks, attempts, trials=4000) <= 0.98


@pytest.mark.parametrize(("n_tasks", "flips"), [(10, 0.1), (20, 0.05), (50, 0.05), (20, 0.2)])
def test_where_a_few_tasks_decide_everything_many_attempts_do_not_make_it_sure(
    n_tasks: int, flips: float
) -> None:
    for holds in (report_of_flips_holds, difference_of_flips_holds):
        assert share(holds, (flips, flips), n_tasks, 8, trials=2000) >= 0.93


@pytest.mark.parametrize("alarm", [false_alarm_of_one, false_alarm_of_half])
def test_uneven_attempts_raise_no_more_false_alarms(alarm: Simulation) -> None:
    assert share(alarm, HIGH, 20, 8, trials=800) <= 0.05
    assert share(alarm, MIDDLE, 40, 8, trials=400) <= 0.06


@pytest.mark.parametrize("attempts", [1, 4])
def test_no_change_is_called_one_in_at_most_five_percent(attempts: int) -> None:
    assert 0.02 <= share(false_alarm, MIDDLE, 60, attempts, trials=1000) <= 0.05
    assert share(false_alarm_anywhere, MIDDLE, 60, attempts, trials=1000) <= 0.05
