"""Near-duplicate detection, with similarities worked by hand."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import pytest

from skyfleet.tasks.duplicates import find_near_duplicates
from skyfleet.tasks.task import RecordedCall, Task

TWENTY = " ".join("abcdefghijklmnopqrst")
"""Nineteen pairs of words."""


def make_task(prompt: str, **fields: Any) -> Task:
    return Task(key=prompt, env_key="e", prompt=prompt, **{"verifier_code": "v"} | fields)


@pytest.mark.parametrize(
    ("prompt", "near"),
    [
        (TWENTY.upper() + "!", True),
        (TWENTY.replace("t", "x"), True),  # 18 of 20
        (TWENTY.replace("j", "x"), True),  # 17 of 21 = 0.81
        (TWENTY.replace("j", "x").replace("t", "y"), False),  # 16 of 22 = 0.73
        (TWENTY.replace("t", "7"), False),  # another number
    ],
)
def test_prompts_that_differ_in_one_word_of_twenty_are_near_duplicates(
    prompt: str, near: bool
) -> None:
    assert find_near_duplicates([make_task(TWENTY), make_task(prompt)]) == ({1: 0} if near else {})


@pytest.mark.parametrize(
    "fields",
    [
        {"verifier_code": "another"},
        {"solution": (RecordedCall(name="f"),)},
        {"data_key": "d"},
        {"data_version": "2"},
        {"env_variables": {"USER": "Ana"}},
    ],
)
def test_tasks_with_different_grading_are_not_compared(fields: dict[str, Any]) -> None:
    assert find_near_duplicates([make_task(TWENTY), make_task(TWENTY, **fields)]) == {}


def test_tasks_without_grading_and_short_prompts_are_not_compared() -> None:
    assert find_near_duplicates([make_task(TWENTY, verifier_code=None)] * 2) == {}
    assert find_near_duplicates([make_task("a b c d e f g")] * 2) == {}
    assert find_near_duplicates([make_task("a b c d e f g h")] * 2) == {1: 0}


def test_a_near_duplicate_of_a_dropped_duplicate_stays() -> None:
    once = TWENTY.replace("t", "x")  # near to the first
    twice = once.replace("j", "y")  # near to `once`: 17 of 21; to the first only 16 of 22
    assert find_near_duplicates([make_task(TWENTY), make_task(once), make_task(twice)]) == {1: 0}
    assert find_near_duplicates([make_task(once), make_task(twice)]) == {1: 0}


def test_thousands_of_tasks_of_one_template_are_compared_quickly() -> None:
    names = [f"{a}{b}{c}" for a in "abcdefghij" for b in "klmnopqrst" for c in "uvwxyzabcd"]
    tasks = [make_task(f"{TWENTY} {one} {one}x {one}y {one}z {one}w {one}v") for one in names * 3]
    start = perf_counter()
    assert len(find_near_duplicates(tasks)) == 2000
    assert perf_counter() - start < 5
