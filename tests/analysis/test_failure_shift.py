"""Class shifts: shares task by task, and whether they are more than chance."""

from __future__ import annotations

import pytest

from skyfleet.analysis.before_after import EpisodeOutcome, FailureShift, compute_failure_shifts
from skyfleet.analysis.failure_class import FailureClass

LOOP, GAVE_UP = FailureClass.LOOP, FailureClass.GAVE_UP


def named(shifts: list[FailureShift], name: str) -> FailureShift:
    (shift,) = [shift for shift in shifts if shift.name == name]
    return shift


def test_attempts_are_averaged_by_task_and_tasks_of_one_side_left_out() -> None:
    before: list[EpisodeOutcome] = [
        ("a", LOOP),
        ("a", LOOP),
        ("a", None),
        ("b", GAVE_UP),
        ("x", LOOP),
    ]
    after: list[EpisodeOutcome] = [("a", None), ("b", None), ("b", GAVE_UP)]
    shifts = compute_failure_shifts(before, after)
    assert [shift.name for shift in shifts] == ["passed", GAVE_UP, LOOP]
    loop = named(shifts, LOOP)
    # Of the two tasks both have: 2/3 and 0 before, none after.
    assert loop.n_tasks == 2
    assert (loop.before, loop.after) == pytest.approx((1 / 3, 0.0))
    assert named(shifts, "passed").difference == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert sum(shift.difference for shift in shifts) == pytest.approx(0)


def test_a_shift_of_most_tasks_is_clear_and_one_of_some_each_way_is_not() -> None:
    before: list[EpisodeOutcome] = [(n, LOOP if n < 16 else None) for n in range(20)]
    after: list[EpisodeOutcome] = [(n, LOOP if n in (0, 18, 19) else None) for n in range(20)]
    loop = named(compute_failure_shifts(before, after), LOOP)
    low, high = loop.interval
    assert loop.difference == pytest.approx(-13 / 20)
    assert low < loop.difference < high < 0
    assert loop.clear
    swapped: list[EpisodeOutcome] = [(n, LOOP if n >= 4 else None) for n in range(20)]
    assert not named(compute_failure_shifts(before, swapped), LOOP).clear


def test_nothing_in_common_is_no_shift() -> None:
    assert compute_failure_shifts([("a", LOOP)], [("b", LOOP)]) == []
