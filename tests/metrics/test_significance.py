"""Significance tests are exact where possible and keep their false-positive rate; power is exact."""

from __future__ import annotations

from collections import Counter
from itertools import product
from math import comb, inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyfleet.metrics.significance import (
    detectable_difference,
    fisher_exact,
    holm,
    mcnemar_exact,
    sign_flip,
    tasks_needed,
)

UNPAIRED = 50 / 116 * 57 / 116 + 66 / 116 * 59 / 116
"""Share of tasks that would differ between two independent samples of 50 and 59 in 116."""


@pytest.mark.parametrize(
    ("gained", "lost", "p"),
    [(0, 0, 1.0), (5, 0, 0.0625), (0, 6, 0.03125), (7, 0, 2 / 128), (3, 1, 0.625), (4, 4, 1.0)],
)
def test_mcnemar_is_a_sign_test_on_the_changed_tasks(gained: int, lost: int, p: float) -> None:
    assert mcnemar_exact(gained, lost) == pytest.approx(p)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 10))
def test_sign_flip_with_single_attempts_is_mcnemar(gained: int, lost: int, same: int) -> None:
    differences = [1.0] * gained + [-1.0] * lost + [0.0] * same
    assert sign_flip(differences) == pytest.approx(mcnemar_exact(gained, lost))


@given(st.lists(st.sampled_from([-1.0, -2 / 3, -1 / 3, 0.0, 1 / 3, 2 / 3, 1.0]), max_size=7))
def test_sign_flip_is_the_share_of_all_sign_combinations(differences: list[float]) -> None:
    flips = list(product((1, -1), repeat=len(differences)))
    sums = [abs(sum(s * d for s, d in zip(f, differences, strict=True))) for f in flips]
    share = sum(s >= abs(sum(differences)) - 1e-9 for s in sums) / len(sums)
    assert sign_flip(differences) == pytest.approx(share)


def test_sign_flip_with_forty_sizes_is_exact() -> None:
    """Sizes 1 to 40: the exact share of signed sums, by adding one size after the other."""
    differences = [-size if size % 8 < 3 else size for size in range(1, 41)]
    ways = Counter({0: 1})
    for size in range(1, 41):
        ways = Counter({s: ways[s - size] + ways[s + size] for s in range(-820, 821)})
    exact = sum(n for s, n in ways.items() if abs(s) >= sum(differences)) / 2**40
    assert 0.05 < exact < 0.5
    assert sign_flip(differences) == pytest.approx(exact)


def test_sign_flip_without_a_common_denominator_is_sampled_and_close() -> None:
    differences = [size**0.5 * (-1) ** (size % 5 < 2) for size in range(1, 15)]
    flips = np.array(list(product((1, -1), repeat=14)))
    exact = np.mean(np.abs(flips @ np.array(differences)) >= abs(sum(differences)) - 1e-9)
    assert sign_flip(differences, seed=3) == pytest.approx(exact, abs=0.006)
    assert sign_flip(differences, seed=3) == sign_flip(differences, seed=3)


def test_sign_flip_handles_any_mix_of_attempt_counts() -> None:
    """Halves and thirds to sixteenths have no small common denominator."""
    differences = [1 / attempts for attempts in range(2, 17)]
    assert sign_flip(differences) == pytest.approx(2 / 2**15, abs=1e-3)


def test_one_task_is_never_significant() -> None:
    assert sign_flip([1.0]) == 1.0


@pytest.mark.parametrize(
    ("before", "after", "n", "p"),
    [
        (1, 6, 7, 2 * (49 + 1) / 3432),
        (0, 0, 5, 1.0),
        (3, 3, 9, 1.0),
        (0, 4, 4, 2 / 70),
    ],
)
def test_fisher_on_counts_worked_by_hand(before: int, after: int, n: int, p: float) -> None:
    assert fisher_exact(before, after, n) == pytest.approx(p)


def test_the_published_gains_are_not_significant_by_fisher() -> None:
    assert fisher_exact(50, 59, 116) == pytest.approx(0.2926, abs=1e-4)
    assert fisher_exact(14, 21, 30) == pytest.approx(0.1154, abs=1e-4)


def test_false_positives_stay_below_five_percent() -> None:
    rng = np.random.default_rng(2)
    trials = 1000
    hardness = rng.beta(1, 1, (trials, 14))
    changes = (rng.binomial(4, hardness) - rng.binomial(4, hardness)) / 4
    alarms = sum(sign_flip(row.tolist()) < 0.05 for row in changes)
    assert 0.02 <= alarms / trials <= 0.06


def test_holm_corrects_by_rank_and_keeps_the_order() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.02]) == pytest.approx([0.6, 0.04])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def mcnemar_power(n: int, difference: float, discordance: float) -> float:
    """By enumerating the numbers of gained and lost tasks."""
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


def test_the_published_gain_needs_652_tasks_and_had_116() -> None:
    assert tasks_needed(9 / 116, UNPAIRED) == 652
    assert detectable_difference(116, UNPAIRED) == pytest.approx(0.18, abs=0.005)


def test_a_quarter_of_the_discordance_halves_the_detectable_difference() -> None:
    assert detectable_difference(116, UNPAIRED / 4) == pytest.approx(0.092, abs=0.001)


@given(st.integers(50, 2000), st.floats(0.01, 1.0))
def test_the_detectable_difference_needs_exactly_n_tasks(n: int, d: float) -> None:
    smallest = detectable_difference(n, d)
    if smallest < d:
        assert tasks_needed(smallest, d) == n


@pytest.mark.parametrize("discordance", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("n", [6, 7, 10, 19, 30, 49])
def test_with_few_tasks_the_power_is_that_of_the_exact_test(n: int, discordance: float) -> None:
    smallest = detectable_difference(n, discordance)
    assert mcnemar_power(n, smallest, max(discordance, smallest)) == pytest.approx(0.8, abs=1e-4)
    assert tasks_needed(smallest, max(discordance, smallest)) <= n


def test_at_least_six_tasks_are_needed_to_detect_anything() -> None:
    """Five gained and none lost is p = 1/16, six is 1/32."""
    for attempts in (1, 8):
        assert [detectable_difference(n, 0.5, attempts=attempts) for n in (1, 4, 5)] == [inf] * 3
        assert detectable_difference(6, 0.0, attempts=attempts) < 1.0
        assert tasks_needed(1.0, 1.0, attempts=attempts) == tasks_needed(-1.0, 1.0) == 6


@pytest.mark.parametrize(("difference", "discordance"), [(0.4, 0.4), (0.5, 0.6), (0.3, 0.35)])
def test_tasks_needed_reaches_the_power_and_two_fewer_do_not(
    difference: float, discordance: float
) -> None:
    n = tasks_needed(difference, discordance)
    assert mcnemar_power(n, difference, discordance) >= 0.8
    assert mcnemar_power(n - 2, difference, discordance) < 0.8


def test_tasks_needed_bounds_the_discordance_by_one_attempt() -> None:
    """With uneven attempts the rates may differ by 3 points while the drawn attempts agree."""
    assert tasks_needed(0.03, 0.03**2) == tasks_needed(0.03, 0.03)


def test_without_observed_discordance_a_difference_is_still_needed() -> None:
    assert 0.3 < detectable_difference(19, 0.0) < 0.45
    assert detectable_difference(19, 0.0, attempts=4) < 0.12


def test_sign_flip_detects_its_detectable_difference_about_80_percent_of_the_time() -> None:
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


def test_mcnemar_detects_its_detectable_difference_80_percent_of_the_time() -> None:
    """200 tasks of which 30 % change: the exact test finds it a little less often."""
    n, discordance = 200, 0.3
    difference = detectable_difference(n, discordance)
    rng = np.random.default_rng(4)
    up, down = (discordance + difference) / 2, (discordance - difference) / 2
    counts = rng.multinomial(n, [up, down, 1 - discordance], size=2000)
    found = sum(mcnemar_exact(int(gained), int(lost)) < 0.05 for gained, lost, _ in counts)
    assert 0.74 <= found / 2000 <= 0.82


@pytest.mark.parametrize(("difference", "discordance"), [(0.0, 0.5), (0.5, 0.1)])
def test_an_impossible_difference_raises(difference: float, discordance: float) -> None:
    with pytest.raises(ValueError, match=f"difference={difference}"):
        tasks_needed(difference, discordance)
