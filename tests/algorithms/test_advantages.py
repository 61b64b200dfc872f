"""Each attempt is compared with its own group, and with nothing else."""

from __future__ import annotations

import pytest

from skyfleet.algorithms.advantages import estimator, grpo, rloo
from skyfleet.errors import ConfigError


def test_grpo_counts_sample_deviations_from_the_mean() -> None:
    assert grpo([1, 0, 0, 0]) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)
    # Mean 1/2; squares sum to 1, so the sample deviation is the root of 1/3.
    assert grpo([1, 1, 0, 0]) == pytest.approx([0.8660, 0.8660, -0.8660, -0.8660], abs=1e-4)


def test_grpo_without_the_deviation_is_the_distance_from_the_mean() -> None:
    assert grpo([1, 0, 0, 0], norm_by_std=False) == [0.75, -0.25, -0.25, -0.25]


def test_rloo_compares_each_attempt_with_the_others() -> None:
    assert rloo([1.0, 0.0, 0.0]) == [1.0, -0.5, -0.5]


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_nothing_is_learned_where_there_is_nothing_to_compare(name: str) -> None:
    estimate = estimator(name)
    assert estimate([]) == []
    assert estimate([1.0]) == [0.0]
    assert estimate([1.0, 1.0, 1.0]) == [0.0, 0.0, 0.0]


def test_an_unknown_estimator_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"advantage_estimator='gpro'; .*\['grpo', 'rloo'\]"):
        estimator("gpro")
