"""Which tasks nearly repeat an earlier one, with indexes worked by hand."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import pytest

from skyfleet.tasks.duplicates import near_twins
from skyfleet.tasks.task import RecordedCall, Task

TWENTY = " ".join("abcdefghijklmnopqrst")
"""Nineteen pairs of words."""


def asking(prompt: str, **fields: Any) -> Task:
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
def test_one_word_of_twenty_may_be_another(prompt: str, near: bool) -> None:
    assert near_twins([asking(TWENTY), asking(prompt)]) == ({1: 0} if near else {})


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
def test_tasks_that_are_judged_otherwise_are_not_compared(fields: dict[str, Any]) -> None:
    assert near_twins([asking(TWENTY), asking(TWENTY, **fields)]) == {}


def test_tasks_that_nothing_judges_and_short_prompts_are_not_compared() -> None:
    assert near_twins([asking(TWENTY, verifier_code=None)] * 2) == {}
    assert near_twins([asking("a b c d e f g")] * 2) == {}
    assert near_twins([asking("a b c d e f g h")] * 2) == {1: 0}


def test_what_repeats_only_a_repetition_stays() -> None:
    once = TWENTY.replace("t", "x")  # near to the first
    twice = once.replace("j", "y")  # near to `once`: 17 of 21; to the first only 16 of 22
    assert near_twins([asking(TWENTY), asking(once), asking(twice)]) == {1: 0}
    assert near_twins([asking(once), asking(twice)]) == {1: 0}


def test_thousands_of_one_template_take_seconds() -> None:
    names = [f"{a}{b}{c}" for a in "abcdefghij" for b in "klmnopqrst" for c in "uvwxyzabcd"]
    tasks = [asking(f"{TWENTY} {one} {one}x {one}y {one}z {one}w {one}v") for one in names * 3]
    start = perf_counter()
    assert len(near_twins(tasks)) == 2000
    assert perf_counter() - start < 5
