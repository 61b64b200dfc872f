"""Significance tests are exact where they can be, and never raise more false alarms than said."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyfleet.metrics.significance import fisher_exact, holm, mcnemar_exact, sign_flip


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


def test_forty_sizes_are_added_up_exactly() -> None:
    """Sizes 1 to 40: the exact share of signed sums, by adding one size after the other."""
    differences = [-size if size % 8 < 3 else size for size in range(1, 41)]
    ways = Counter({0: 1})
    for size in range(1, 41):
        ways = Counter({s: ways[s - size] + ways[s + size] for s in range(-820, 821)})
    exact = sum(n for s, n in ways.items() if abs(s) >= sum(differences)) / 2**40
    assert 0.05 < exact < 0.5
    assert sign_flip(differences) == pytest.approx(exact)


def test_sizes_without_a_common_measure_are_drawn_and_come_near_the_exact_share() -> None:
    differences = [size**0.5 * (-1) ** (size % 5 < 2) for size in range(1, 15)]
    flips = np.array(list(product((1, -1), repeat=14)))
    exact = np.mean(np.abs(flips @ np.array(differences)) >= abs(sum(differences)) - 1e-9)
    assert sign_flip(differences, seed=3) == pytest.approx(exact, abs=0.006)
    assert sign_flip(differences, seed=3) == sign_flip(differences, seed=3)


def test_attempts_of_every_number_are_still_exact_or_drawn() -> None:
    """Halves and thirds to sixteenths have no small common measure."""
    differences = [1 / attempts for attempts in range(2, 17)]
    assert sign_flip(differences) == pytest.approx(2 / 2**15, abs=1e-3)


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
