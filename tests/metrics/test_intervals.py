"""Intervals reach their nominal coverage at the usual sizes; pass@k counts all draws."""

from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyfleet.metrics.intervals import (
    cluster_bootstrap,
    mean_rate,
    newcombe,
    paired_difference,
    pass_at_k,
    pass_hat_k,
    repeated_mean,
    wilson,
)


def test_wilson_on_the_published_50_and_59_of_116() -> None:
    assert wilson(50 / 116, 116) == pytest.approx((0.345, 0.522), abs=5e-4)
    assert wilson(59 / 116, 116) == pytest.approx((0.419, 0.598), abs=5e-4)


def test_wilson_at_0_and_1_has_a_width() -> None:
    assert wilson(1.0, 19) == pytest.approx((19 / (19 + 1.959964**2), 1.0))
    assert wilson(0.0, 19) == pytest.approx((0.0, 1.959964**2 / (19 + 1.959964**2)))


def test_without_tasks_the_interval_is_the_whole_range() -> None:
    assert wilson(0.0, 0) == (0.0, 1.0)
    assert cluster_bootstrap([]) == (0.0, 1.0)
    assert mean_rate([]) == (0.0, 1.0)
    assert paired_difference([]) == (-1.0, 1.0)


@pytest.mark.parametrize("rate", [0.3, 0.5, 0.8])
def test_wilson_covers_95_percent(rate: float) -> None:
    n = 76
    covered = 0.0
    for c in range(n + 1):
        low, high = wilson(c / n, n)
        if low <= rate <= high:
            covered += comb(n, c) * rate**c * (1 - rate) ** (n - c)
    assert 0.93 <= covered <= 0.97


def test_the_bootstrap_is_seeded() -> None:
    rates = [0.0, 0.25, 0.5, 1.0, 1.0, 0.75]
    assert cluster_bootstrap(rates, seed=1) == cluster_bootstrap(rates, seed=1)
    assert cluster_bootstrap(rates, seed=1) != cluster_bootstrap(rates, seed=2)


def test_the_bootstrap_resamples_tasks_not_attempts() -> None:
    """40 tasks of one attempt each, or of ten like attempts: the same evidence."""
    rates = [1.0] * 20 + [0.0] * 20
    assert cluster_bootstrap(rates) == pytest.approx(wilson(0.5, 40), abs=0.02)


def test_the_bootstrap_of_equal_tasks_is_wilsons() -> None:
    assert cluster_bootstrap([1.0] * 19) == wilson(1.0, 19)
    assert cluster_bootstrap([0.5]) == wilson(0.5, 1)


@pytest.mark.parametrize(("n_tasks", "rate"), [(30, 0.5), (40, 0.8)])
def test_the_bootstrap_covers_95_percent_with_tasks_of_different_difficulty(
    n_tasks: int, rate: float
) -> None:
    rng = np.random.default_rng(7)
    trials = 500
    hardness = rng.beta(3 * rate, 3 * (1 - rate), (trials, n_tasks))
    covered = 0
    for rates in rng.binomial(4, hardness) / 4:
        low, high = cluster_bootstrap(rates.tolist(), n_resamples=1000)
        covered += low <= rate <= high
    assert 0.93 <= covered / trials <= 0.97


def test_the_interval_of_rates_grows_with_their_skewness() -> None:
    """3, 1 and 1 of 4: deviations 1/3, -1/6, -1/6 of 5/12, and t² is 18.5128 with two degrees.

    Squares 1/6, cubes 1/36; upwards half a task lies 7/12 away, downwards 5/12:
    (1/36 + 343/3456) / (1/6 + 49/288) = 439/1164 and (-1/36 + 125/3456) / (1/6 + 25/288) = 29/876.
    """
    scale = 18.5128205 / 3
    up, down = scale * 439 / 1164, scale * 29 / 876
    low, high = mean_rate([0.75, 0.25, 0.25])
    for distance, growth in ((high - 5 / 12, up), (5 / 12 - low, down)):
        # The end is where distance² equals the variance allowed there.
        expected = (growth + (growth**2 + 4 * (1 + scale) * scale / 18) ** 0.5) / (2 + 2 * scale)
        assert distance == pytest.approx(min(expected, 7 / 12))


def test_with_single_attempts_at_many_tasks_the_interval_is_wilsons() -> None:
    assert mean_rate([1.0] * 600 + [0.0] * 1400) == pytest.approx(wilson(0.3, 2000), abs=2e-4)


def test_equal_rates_still_have_an_interval() -> None:
    """For any number of attempts: if 14 of 100 tasks fail, 20 drawn ones may all pass."""
    low, high = mean_rate([1.0] * 20)
    assert low == pytest.approx(20 / (20 + 2.0930241**2))
    assert high == 1.0


def test_the_paired_interval_is_students_and_wider_on_the_skewed_side() -> None:
    """11 gained, 4 lost of 30: mean 7/30, squares 15 - 49/30 = 401/30, and t is 2.0452296.

    Cubes 7 - 3 * 7/30 * 15 + 2 * 30 * (7/30)³ = -2.7378: upwards (-1.3689 + 0.13) is below 0.
    """
    squares, cubes = 401 / 30, 7 - 3 * 7 / 30 * 15 + 2 * 30 * (7 / 30) ** 3
    scale = 2.0452296**2 / 30
    growth = scale * (-cubes / 2 + 0.13) / (squares + 0.13)
    down = (growth + (growth**2 + 4 * scale * squares / 29) ** 0.5) / 2
    low, high = paired_difference([1.0] * 11 + [-1.0] * 4 + [0.0] * 15)
    assert high == pytest.approx(7 / 30 + (scale * squares / 29) ** 0.5)
    assert low == pytest.approx(7 / 30 - down)


def test_the_paired_interval_without_a_change_has_a_width() -> None:
    low, high = paired_difference([0.0] * 19)
    assert high == -low == pytest.approx(1.959964**2 / (19 + 1.959964**2))


def test_the_paired_interval_covers_a_gain_from_zero() -> None:
    rng = np.random.default_rng(6)
    trials = 2000
    changes = rng.binomial(1, 0.1, (trials, 20)).astype(float)
    intervals = [paired_difference(row.tolist()) for row in changes]
    assert sum(low <= 0.1 <= high for low, high in intervals) / trials >= 0.94


def test_newcombe_on_the_published_50_and_59_of_116() -> None:
    """50 and 59 of 116: from Wilson's ends 0.3446, 0.5220 and 0.4188, 0.5979."""
    low, high = newcombe(50 / 116, 59 / 116, 116)
    assert low == pytest.approx(9 / 116 - (0.0898**2 + 0.0910**2) ** 0.5, abs=2e-4)
    assert high == pytest.approx(9 / 116 + (0.0893**2 + 0.0864**2) ** 0.5, abs=2e-4)
    assert newcombe(59 / 116, 50 / 116, 116) == pytest.approx((-high, -low))


@pytest.mark.parametrize("attempts", [1, 4])
@pytest.mark.parametrize(("before", "after"), [(0.5, 0.5), (0.45, 0.6)])
def test_the_paired_interval_covers_95_percent(attempts: int, before: float, after: float) -> None:
    rng = np.random.default_rng(11)
    trials, n_tasks = 3000, 60
    hardness = rng.beta(4 * before, 4 * (1 - before), (trials, n_tasks))
    eased = hardness + (after - before) / (1 - before) * (1 - hardness)
    changes = (rng.binomial(attempts, eased) - rng.binomial(attempts, hardness)) / attempts
    covered = 0
    for differences in changes:
        low, high = paired_difference(differences.tolist())
        covered += low <= after - before <= high
    assert 0.94 <= covered / trials <= 0.98


def test_the_paired_interval_holds_near_the_ceiling_with_few_tasks() -> None:
    rng = np.random.default_rng(5)
    trials = 2000
    changes = (rng.binomial(4, 0.97, (trials, 10)) - rng.binomial(4, 0.95, (trials, 10))) / 4
    intervals = [paired_difference(row.tolist()) for row in changes]
    assert sum(low <= 0.02 <= high for low, high in intervals) / trials >= 0.93


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), min_size=1, max_size=12))
def test_an_interval_of_rates_lies_within_zero_and_one(rates: list[float]) -> None:
    for low, high in (cluster_bootstrap(rates, n_resamples=200), mean_rate(rates)):
        assert 0.0 <= low < high <= 1.0


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_pass_at_k_and_pass_hat_k_are_shares_of_all_draws(n: int) -> None:
    for c in range(n + 1):
        for k in range(1, n + 1):
            draws = list(combinations([True] * c + [False] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))
            assert pass_hat_k(n, c, k) == pytest.approx(sum(map(all, draws)) / len(draws))


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0), (0, 0, 1)])
def test_impossible_counts_raise(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"n={n}, c={c}, k={k}"):
        pass_at_k(n, c, k)


def test_repeated_measurements_have_students_interval() -> None:
    """Mean 2, standard deviation 1, t of two degrees of freedom 4.303: 2 +- 4.303 / sqrt(3)."""
    low, high = repeated_mean([1.0, 2.0, 3.0])
    assert (low, high) == pytest.approx((0.0, 4.4842), abs=1e-3)
    assert repeated_mean([9.0, 10.0, 11.0]) == pytest.approx((7.5158, 12.4842), abs=1e-3)
    assert repeated_mean([5.0]) == (5.0, 5.0)
