"""Group estimators on numbers worked by hand, and estimators from a user's module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from inspect import signature

import pytest
from tests.fakes.samples import sample

from skyfleet.algorithms.advantages import (
    discount,
    gae,
    grpo,
    maxrl,
    rloo,
    standardize,
    whiten,
)
from skyfleet.algorithms.estimator import BatchEstimator
from skyfleet.algorithms.registry import build_advantage_estimator
from skyfleet.algorithms.sample import Sample
from skyfleet.config.algorithm import ADVANTAGE_ESTIMATORS, Algorithm
from skyfleet.errors import ConfigError


def test_grpo_divides_the_distance_from_the_mean_by_the_sample_deviation() -> None:
    assert grpo([1, 0, 0, 0]) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)
    # Mean 1/2; squares sum to 1, so the sample deviation is the root of 1/3.
    assert grpo([1, 1, 0, 0]) == pytest.approx([0.8660, 0.8660, -0.8660, -0.8660], abs=1e-4)


def test_grpo_without_the_deviation_is_the_distance_from_the_mean() -> None:
    assert grpo([1, 0, 0, 0], norm_by_std=False) == [0.75, -0.25, -0.25, -0.25]


def test_rloo_compares_each_attempt_with_the_others() -> None:
    assert rloo([1.0, 0.0, 0.0]) == [1.0, -0.5, -0.5]


def test_maxrl_divides_the_distance_from_the_mean_by_the_mean() -> None:
    assert maxrl([1, 0, 0, 0]) == pytest.approx([3, -1, -1, -1], abs=2e-5)
    assert maxrl([1, 1, 1, 0]) == pytest.approx([1 / 3, 1 / 3, 1 / 3, -1], abs=1e-5)


@pytest.mark.parametrize("rewards", [[0, 0, -0.5, 0], [1, -1], [-0.001, -0.01]])
def test_maxrl_is_zero_for_a_mean_that_is_not_positive(rewards: list[float]) -> None:
    assert maxrl(rewards) == [0.0] * len(rewards)


@pytest.mark.parametrize("name", ["grpo", "rloo", "maxrl"])
def test_single_attempts_and_equal_rewards_have_zero_advantage(name: str) -> None:
    """SkyRL gives a group of one its raw score as its advantage, under grpo and maxrl."""
    estimate = build_advantage_estimator(Algorithm(advantage_estimator=name))
    assert not isinstance(estimate, BatchEstimator)
    assert estimate([]) == []
    assert estimate([1.0]) == [0.0]
    assert estimate([1.0, 1.0, 1.0]) == [0.0, 0.0, 0.0]


def test_every_name_of_an_estimator_in_the_configuration_can_be_built() -> None:
    for name in ADVANTAGE_ESTIMATORS:
        estimate = build_advantage_estimator(Algorithm(advantage_estimator=name))
        assert callable(estimate) or isinstance(estimate, BatchEstimator)


def test_a_users_estimator_is_named_by_module_and_function() -> None:
    own = build_advantage_estimator(
        Algorithm(advantage_estimator="skyfleet.algorithms.advantages:rloo")
    )
    assert not isinstance(own, BatchEstimator)
    assert own([1.0, 0.0, 0.0]) == [1.0, -0.5, -0.5]
    with pytest.raises(ConfigError, match="'nowhere:rloo' cannot be imported"):
        build_advantage_estimator(Algorithm(advantage_estimator="nowhere:rloo"))


def test_an_object_that_is_not_callable_is_refused() -> None:
    with pytest.raises(ConfigError, match="'math:pi' is a float; name a function of a group's"):
        build_advantage_estimator(Algorithm(advantage_estimator="math:pi"))


def shifted(samples: Sequence[Sample], *, by: float = 0.0) -> list[Sample]:
    return [replace(s, advantages=tuple(x + by for x in s.advantages)) for s in samples]


batch_shifted = BatchEstimator(credit=shifted)


def test_a_users_estimator_gets_its_settings() -> None:
    own = build_advantage_estimator(
        Algorithm(
            advantage_estimator="skyfleet.algorithms.advantages:grpo",
            advantage_estimator_kwargs={"norm_by_std": False},
        )
    )
    assert not isinstance(own, BatchEstimator)
    assert own([1.0, 0.0]) == [0.5, -0.5]


def test_a_users_batch_estimator_gets_its_settings() -> None:
    whole = build_advantage_estimator(
        Algorithm(
            advantage_estimator=f"{__name__}:batch_shifted", advantage_estimator_kwargs={"by": 2.0}
        )
    )
    assert isinstance(whole, BatchEstimator)
    (made,) = whole.credit([sample([1, 2], [False, True], advantage=1.0)])
    assert made.advantages[1] == 3.0


@pytest.mark.parametrize(
    ("own", "kwargs", "takes", "complaint"),
    [
        (
            "skyfleet.algorithms.advantages:discount",
            {},
            "a group's rewards",
            "missing a required",
        ),
        ("math:fsum", {"gamma": 1.0}, "a group's rewards", "got an unexpected"),
        (f"{__name__}:batch_shifted", {"gamma": 1.0}, "a batch's samples", "got an unexpected"),
    ],
)
def test_settings_that_a_users_estimator_does_not_take_are_refused(
    own: str, kwargs: dict[str, float], takes: str, complaint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build_advantage_estimator(
            Algorithm(advantage_estimator=own, advantage_estimator_kwargs=kwargs)
        )
    assert str(caught.value).startswith(
        f"trainer.algorithm.advantage_estimator='{own}' is called with {takes} and "
        f"trainer.algorithm.advantage_estimator_kwargs={kwargs}: {complaint}"
    )


def test_a_builtin_without_a_signature_can_be_an_estimator() -> None:
    with pytest.raises(ValueError, match="no signature"):
        signature(max)
    build_advantage_estimator(Algorithm(advantage_estimator="builtins:max"))


def test_a_return_is_the_discounted_sum_of_later_rewards() -> None:
    # From the right: 1; 0 + 1/2; 2 + 1/4.
    assert discount([2.0, 0.0, 1.0], gamma=0.5) == [2.25, 0.5, 1.0]


def test_gae_sums_the_discounted_td_errors() -> None:
    advantages, targets = gae([0.0, 0.0, 1.0], [0.5, 0.4, 0.8], gamma=0.9, lambd=0.5)
    # TD errors r + 0.9 V' - V: -0.14, 0.32, 0.2. From the right with 0.45: 0.2, 0.41, 0.0445.
    assert advantages == pytest.approx([0.0445, 0.41, 0.2])
    assert targets == pytest.approx([0.5445, 0.81, 1.0])


def test_whitening_uses_the_sample_deviation_and_standardizing_the_population_deviation() -> None:
    # Mean 2, squares 1, 1, 4, 4: variance 10/3 of the sample, 10/4 of the population.
    values = [1.0, 3.0, 0.0, 4.0]
    assert whiten(values) == pytest.approx([-0.54772, 0.54772, -1.09545, 1.09545], abs=1e-5)
    assert standardize(values) == pytest.approx([-0.63246, 0.63246, -1.26491, 1.26491], abs=1e-5)
    assert whiten([7.0]).tolist() == [0.0]
    assert standardize([]).tolist() == []
