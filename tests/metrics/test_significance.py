"""Significance tests are exact where they can be, and never raise more false alarms than said."""

from __future__ import annotations

from collections import Counter
from itertools import product
from math import inf

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


@pytest.mark.parametrize(
    ("gained", "lost", "p"),
    [(0, 0, 1.0), (5, 0, 0.0625), (0, 6, 0.03125), (7, 0, 2 / 128), (3, 1, 0.625), (4, 4, 1.0)],
)
def test_mcnemar_counts_coin_tosses(gained: int, lost: int, p: float) -> None:
    assert mcnemar_exact(gained, lost) == pytest.approx(p)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 10))
def test_a_sign_flip_of_single_attempts_is_mcnemar(gained: int, lost: int, same: int) -> None:
    differences = [1.0] * gained + [-1.0] * lost + [0.0] * same
    assert sign_flip(differences) == pytest.approx(mcnemar_exact(gained, lost))


@given(st.lists(st.sampled_from([-1.0, -2 / 3, -1 / 3, 0.0, 1 / 3, 2 / 3, 1.0]), max_size=7))
def test_a_sign_flip_is_the_share_of_all_flips(differences: list[float]) -> None:
    flips = list(product((1, -1), repeat=len(differences)))
    sums = [abs(sum(s * d for s, d in zip(f, differences, strict=True))) for f in flips]
    share = sum(s >= abs(sum(differences)) - 1e-9 for s in sums) / len(sums)
    assert sign_flip(differences) == pytest.approx(share)


def test_too_many_sizes_to_list_are_drawn_and_come_near_the_exact_share() -> None:
    """Sizes 1 to 40: the exact share of signed sums, by adding one size after the other."""
    differences = [-size if size % 8 < 3 else size for size in range(1, 41)]
    ways = Counter({0: 1})
    for size in range(1, 41):
        ways = Counter({s: ways[s - size] + ways[s + size] for s in range(-820, 821)})
    exact = sum(n for s, n in ways.items() if abs(s) >= sum(differences)) / 2**40
    assert 0.05 < exact < 0.5
    assert sign_flip(differences, seed=3) == pytest.approx(exact, abs=0.004)
    assert sign_flip(differences, seed=3) == sign_flip(differences, seed=3)


def test_twenty_eight_attempts_at_one_task_prove_nothing() -> None:
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
def test_fisher_counts_the_ways_to_draw(before: int, after: int, n: int, p: float) -> None:
    assert fisher_exact(before, after, n) == pytest.approx(p)


def test_the_seeds_headline_is_not_significant_by_fisher() -> None:
    assert fisher_exact(50, 59, 116) == pytest.approx(0.2926, abs=1e-4)
    assert fisher_exact(14, 21, 30) == pytest.approx(0.1154, abs=1e-4)


def test_false_alarms_stay_below_five_percent() -> None:
    rng = np.random.default_rng(2)
    trials = 1000
    hardness = rng.beta(1, 1, (trials, 14))
    changes = (rng.binomial(4, hardness) - rng.binomial(4, hardness)) / 4
    alarms = sum(sign_flip(row.tolist()) < 0.05 for row in changes)
    assert 0.02 <= alarms / trials <= 0.06


def test_holm_corrects_in_order_and_keeps_places() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.02]) == pytest.approx([0.6, 0.04])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


UNPAIRED = 50 / 116 * 57 / 116 + 66 / 116 * 59 / 116
"""Share of tasks that would differ between two unrelated arms of 50 and 59 in 116."""


def test_the_seed_headline_needs_652_tasks_and_had_116() -> None:
    assert tasks_needed(9 / 116, UNPAIRED) == 652
    assert detectable_difference(116, UNPAIRED) == pytest.approx(0.18, abs=0.005)


def test_pairing_halves_the_noise() -> None:
    assert detectable_difference(116, UNPAIRED / 4) == pytest.approx(0.092, abs=0.001)


@given(st.integers(10, 2000), st.floats(0.01, 1.0))
def test_the_detectable_difference_is_the_one_that_needs_all_tasks(n: int, d: float) -> None:
    smallest = detectable_difference(n, d)
    if smallest < d:
        assert tasks_needed(smallest, d) == n


def test_too_few_tasks_detect_nothing() -> None:
    assert detectable_difference(3, 0.5) == inf
    assert detectable_difference(4, 0.0) < 1.0


def test_no_discordance_seen_does_not_mean_any_change_would_be() -> None:
    assert 0.3 < detectable_difference(19, 0.0) < 0.45
    assert detectable_difference(19, 0.0, attempts=4) < 0.12


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
