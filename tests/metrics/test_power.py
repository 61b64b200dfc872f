"""What a comparison is said to be able to see, the exact test sees."""

from __future__ import annotations

from math import comb, inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyfleet.metrics.significance import (
    detectable_difference,
    mcnemar_exact,
    sign_flip,
    tasks_needed,
)

UNPAIRED = 50 / 116 * 57 / 116 + 66 / 116 * 59 / 116
"""Share of tasks that would differ between two unrelated arms of 50 and 59 in 116."""


def mcnemar_power(n: int, difference: float, discordance: float) -> float:
    """By listing how many tasks are gained and lost."""
    up, down = (discordance + difference) / 2, max(0.0, discordance - difference) / 2
    return sum(
        comb(n, gained)
        * comb(n - gained, lost)
        * up**gained
        * down**lost
        * (1 - up - down) ** (n - gained - lost)
        for gained in range(n + 1)
        for lost in range(n + 1 - gained)
        if mcnemar_exact(gained, lost) < 0.05
    )


def test_the_seed_headline_needs_652_tasks_and_had_116() -> None:
    assert tasks_needed(9 / 116, UNPAIRED) == 652
    assert detectable_difference(116, UNPAIRED) == pytest.approx(0.18, abs=0.005)


def test_pairing_halves_the_noise() -> None:
    assert detectable_difference(116, UNPAIRED / 4) == pytest.approx(0.092, abs=0.001)


@given(st.integers(50, 2000), st.floats(0.01, 1.0))
def test_the_detectable_difference_is_the_one_that_needs_all_tasks(n: int, d: float) -> None:
    smallest = detectable_difference(n, d)
    if smallest < d:
        assert tasks_needed(smallest, d) == n


@pytest.mark.parametrize("discordance", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("n", [6, 7, 10, 19, 30, 49])
def test_of_few_tasks_the_exact_test_finds_it_four_times_in_five(
    n: int, discordance: float
) -> None:
    smallest = detectable_difference(n, discordance)
    assert mcnemar_power(n, smallest, max(discordance, smallest)) == pytest.approx(0.8, abs=1e-4)
    assert tasks_needed(smallest, max(discordance, smallest)) <= n


def test_six_tasks_are_the_fewest_that_show_anything() -> None:
    """Five gained and none lost is p = 1/16, six is 1/32."""
    for attempts in (1, 8):
        assert [detectable_difference(n, 0.5, attempts=attempts) for n in (1, 4, 5)] == [inf] * 3
        assert detectable_difference(6, 0.0, attempts=attempts) < 1.0
        assert tasks_needed(1.0, 1.0, attempts=attempts) == tasks_needed(-1.0, 1.0) == 6


@pytest.mark.parametrize(("difference", "discordance"), [(0.4, 0.4), (0.5, 0.6), (0.3, 0.35)])
def test_so_many_tasks_as_are_needed_are_enough(difference: float, discordance: float) -> None:
    n = tasks_needed(difference, discordance)
    assert mcnemar_power(n, difference, discordance) >= 0.8
    assert mcnemar_power(n - 2, difference, discordance) < 0.8


def test_a_difference_that_the_tested_attempts_do_not_show_needs_what_it_would() -> None:
    """Of uneven attempts 3 points may be seen, and none where single ones are drawn."""
    assert tasks_needed(0.03, 0.03**2) == tasks_needed(0.03, 0.03)


def test_no_discordance_seen_does_not_mean_any_change_would_be() -> None:
    assert 0.3 < detectable_difference(19, 0.0) < 0.45
    assert detectable_difference(19, 0.0, attempts=4) < 0.12


def test_several_attempts_find_their_detectable_difference_about_as_often() -> None:
    """20 tasks of 4 attempts at chances of 1/2, and then 3/4: the sign-flip test itself.

    The mean square of a difference is 0.25/4 + 0.1875/4, and 1/16 more for the change.
    """
    rng = np.random.default_rng(5)
    difference = detectable_difference(20, 0.171875, attempts=4)
    assert difference == pytest.approx(0.25, abs=0.01)
    before = rng.binomial(4, 0.5, (600, 20))
    after = rng.binomial(4, 0.5 + difference, (600, 20))
    found = sum(sign_flip(row.tolist()) < 0.05 for row in (after - before) / 4)
    assert 0.72 <= found / 600 <= 0.9


def test_chance_of_finding_the_detectable_difference_is_80_percent() -> None:
    """200 tasks of which 30 % change: the exact test finds it a little less often."""
    n, discordance = 200, 0.3
    difference = detectable_difference(n, discordance)
    rng = np.random.default_rng(4)
    up, down = (discordance + difference) / 2, (discordance - difference) / 2
    counts = rng.multinomial(n, [up, down, 1 - discordance], size=2000)
    found = sum(mcnemar_exact(int(gained), int(lost)) < 0.05 for gained, lost, _ in counts)
    assert 0.74 <= found / 2000 <= 0.82


@pytest.mark.parametrize(("difference", "discordance"), [(0.0, 0.5), (0.5, 0.1)])
def test_an_impossible_difference_is_refused(difference: float, discordance: float) -> None:
    with pytest.raises(ValueError, match=f"difference={difference}"):
        tasks_needed(difference, discordance)
