"""Coverage and false-positive rates are those in docs/evaluation.md, on a small simulation."""

from __future__ import annotations

import pytest
from benchmarks.intervals import (
    Simulation,
    difference_holds,
    difference_of_flips_holds,
    difference_of_swaps_holds,
    false_alarm,
    false_alarm_anywhere,
    false_alarm_of_half,
    false_alarm_of_one,
    interval_and_test_disagree,
    report_holds,
    report_of_flips_holds,
    score_holds,
    share,
)

MIDDLE = (0.1, 0.9)
HIGH = (0.95, 0.95)


@pytest.mark.parametrize(
    ("n_tasks", "attempts"), [(50, 1), (200, 1), (50, 2), (50, 4), (100, 4), (100, 8)]
)
def test_intervals_of_rates_and_differences_cover_94_to_96_percent(
    n_tasks: int, attempts: int
) -> None:
    for holds in (report_holds, difference_holds):
        assert 0.94 <= share(holds, MIDDLE, n_tasks, attempts, trials=4000) <= 0.96


@pytest.mark.parametrize("flips", [0.05, 0.1, 0.2])
@pytest.mark.parametrize("attempts", [2, 4, 8])
def test_intervals_cover_95_percent_if_a_few_tasks_flip_completely(
    flips: float, attempts: int
) -> None:
    for holds in (
        report_of_flips_holds,
        difference_of_flips_holds,
        difference_of_swaps_holds,
    ):
        assert 0.935 <= share(holds, (flips, flips), 100, attempts, trials=2000) <= 0.965


@pytest.mark.parametrize(("n_tasks", "flips"), [(10, 0.1), (20, 0.05), (50, 0.05), (20, 0.2)])
def test_many_attempts_do_not_make_the_interval_of_few_tasks_too_narrow(
    n_tasks: int, flips: float
) -> None:
    for holds in (report_of_flips_holds, difference_of_flips_holds):
        assert share(holds, (flips, flips), n_tasks, 8, trials=2000) >= 0.94


@pytest.mark.parametrize(
    ("n_tasks", "flips", "attempts"), [(35, 1, 2), (100, 2, 4), (200, 2, 8), (500, 2, 8)]
)
def test_many_tasks_do_not_make_the_interval_too_narrow_if_one_or_two_flip(
    n_tasks: int, flips: int, attempts: int
) -> None:
    of_all = flips / n_tasks
    assert (
        share(difference_of_flips_holds, (of_all, of_all), n_tasks, attempts, trials=2000) >= 0.935
    )


@pytest.mark.parametrize("attempts", [1, 4])
def test_the_interval_of_partial_credit_covers_95_percent(attempts: int) -> None:
    assert 0.94 <= share(score_holds, MIDDLE, 50, attempts, trials=4000) <= 0.96


@pytest.mark.parametrize("attempts", [1, 4])
def test_the_interval_and_the_test_rarely_disagree(attempts: int) -> None:
    assert share(interval_and_test_disagree, MIDDLE, 60, attempts, trials=800) <= 0.04


@pytest.mark.parametrize("alarm", [false_alarm_of_one, false_alarm_of_half])
def test_uneven_attempts_do_not_raise_the_false_positive_rate(alarm: Simulation) -> None:
    assert share(alarm, HIGH, 20, 8, trials=800) <= 0.05
    assert share(alarm, MIDDLE, 40, 8, trials=400) <= 0.06


@pytest.mark.parametrize("attempts", [1, 4])
def test_at_most_five_percent_of_comparisons_without_a_change_are_significant(
    attempts: int,
) -> None:
    assert 0.02 <= share(false_alarm, MIDDLE, 60, attempts, trials=1000) <= 0.05
    assert share(false_alarm_anywhere, MIDDLE, 60, attempts, trials=1000) <= 0.05
