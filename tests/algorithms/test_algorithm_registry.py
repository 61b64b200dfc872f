"""Estimators and losses are found by name: built in, in a user's module, or registered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.algorithms.test_losses import inputs
from tests.fakes.samples import sample

from skyfleet.algorithms import advantages
from skyfleet.algorithms.estimator import (
    AdvantageEstimator,
    BatchEstimator,
    estimator_from_function,
)
from skyfleet.algorithms.filters import build_filter
from skyfleet.algorithms.losses.loss import LossInputs, LossOutput, loss_from_function
from skyfleet.algorithms.registry import (
    build_advantage_estimator,
    build_policy_loss,
    built_in_estimators,
    built_in_losses,
    get_estimator,
    get_policy_loss,
    register_estimator,
    register_policy_loss,
)
from skyfleet.algorithms.sample import Sample
from skyfleet.algorithms.validation import algorithm_warnings, check_algorithm
from skyfleet.config.algorithm import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, Algorithm
from skyfleet.config.keys import known_keys
from skyfleet.config.loading import load_config
from skyfleet.errors import ConfigError


def leave_best_out(rewards: Sequence[float], *, scale: float = 1.0) -> list[float]:
    return [scale * (reward - max(rewards)) for reward in rewards]


def all_ones(samples: Sequence[Sample]) -> list[Sample]:
    return [replace(s, advantages=tuple(map(float, s.loss_mask))) for s in samples]


def scaled_loss(given: LossInputs, *, scale: float = 1.0) -> LossOutput:
    return LossOutput(
        loss_T=-scale * given.logprobs_T, metrics_T={"scaled": given.logprobs_T.detach()}
    )


LEAVE_BEST_OUT: AdvantageEstimator = estimator_from_function(leave_best_out, name="leave_best_out")


def test_every_object_has_the_name_it_is_registered_under() -> None:
    assert [estimator.name for estimator in built_in_estimators()] == list(ADVANTAGE_ESTIMATORS)
    assert [loss.name for loss in built_in_losses()] == list(POLICY_LOSSES)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"advantage_estimator='gppo'; choose from \['distill"):
        get_estimator("gppo")
    with pytest.raises(ConfigError, match=r"policy_loss_type='ppo'; choose from \['cispo'"):
        get_policy_loss("ppo")


def test_the_keys_that_algorithms_read_exist() -> None:
    reads = {key for estimator in built_in_estimators() for key in estimator.reads}
    reads |= {key for loss in built_in_losses() for key in loss.reads}
    keys = [f"{key}." for key in known_keys()]
    assert not [name for name in reads if not any(k.startswith(f"trainer.{name}.") for k in keys)]


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_built_in_loss_logs_the_metrics_it_declares(name: str) -> None:
    algorithm, given = Algorithm(policy_loss_type=name), inputs([1.0, 1.5], [1.0, -1.0])
    loss = get_policy_loss(name)
    if loss.build_selector:
        given = replace(given, selected_T=loss.build_selector(algorithm)(given))
    output = loss.build(algorithm)(given)
    logged = {*output.metrics_T, *output.metrics_B, *output.stats_T}
    assert logged == set(loss.metrics or ())
    assert set(loss.filter_metrics) <= logged


def test_the_scope_of_an_estimator_is_how_it_is_called() -> None:
    for estimator in built_in_estimators():
        built = estimator.build(Algorithm(advantage_estimator=estimator.name))
        assert isinstance(built, BatchEstimator) == (estimator.scope == "batch")
        assert estimator.min_group_size == (2 if estimator.scope == "group" else 1)


def test_a_registered_group_estimator_is_used_by_its_name_and_settings() -> None:
    name = register_estimator(LEAVE_BEST_OUT)
    assert name == "python:leave_best_out"
    words = [
        f"trainer.algorithm.advantage_estimator={name}",
        "trainer.algorithm.advantage_estimator_kwargs.scale=2",
    ]
    config = load_config("", words)
    check_algorithm(config)
    assert algorithm_warnings(config) == []
    estimate = build_advantage_estimator(config.trainer.algorithm)
    assert not isinstance(estimate, BatchEstimator)
    assert estimate([1.0, 0.0]) == [0.0, -2.0]


def test_a_registered_batch_estimator_trains_on_single_attempts() -> None:
    ones = estimator_from_function(all_ones, name="all_ones", scope="batch")
    name = register_estimator(ones)
    words = [f"trainer.algorithm.advantage_estimator={name}", "generator.n_samples_per_prompt=1"]
    config = load_config("", words)
    assert algorithm_warnings(config) == []
    built = build_advantage_estimator(config.trainer.algorithm)
    assert isinstance(built, BatchEstimator)
    (made,) = built.credit([sample([1, 2], [False, True], advantage=0.0)])
    assert made.advantages == (0.0, 1.0)
    assert build_filter(config)([]).dropped["too_few_graded"] == 0


def test_a_registered_loss_is_used_by_its_name_and_settings() -> None:
    name = register_policy_loss(loss_from_function(scaled_loss, name="scaled", metrics=("scaled",)))
    assert name == "python:scaled"
    algorithm = Algorithm(policy_loss_type=name, policy_loss_kwargs={"scale": 3.0})
    output = build_policy_loss(algorithm)(inputs([1.0], [1.0]))
    assert output.loss_T.tolist() == [3.0]
    assert get_policy_loss(name).metrics == ("scaled",)


def test_a_metric_that_a_loss_does_not_declare_is_refused() -> None:
    name = register_policy_loss(loss_from_function(scaled_loss, name="quiet", metrics=()))
    loss = build_policy_loss(Algorithm(policy_loss_type=name))
    with pytest.raises(ConfigError, match=r"'python:quiet' logs the metric 'scaled', which it doe"):
        loss(inputs([1.0], [1.0]))


def test_a_name_that_is_not_registered_in_this_process_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'python:gone' is not registered in this process"):
        get_policy_loss("python:gone")


def test_registering_a_name_again_replaces_the_object() -> None:
    first = register_estimator(estimator_from_function(leave_best_out, name="again"))
    second = register_estimator(replace(advantages.RLOO, name="again"))
    assert first == second
    assert get_estimator(second).build is advantages.RLOO.build


def test_a_module_may_hold_an_estimator_object() -> None:
    assert get_estimator(f"{__name__}:LEAVE_BEST_OUT") is LEAVE_BEST_OUT
    assert get_estimator("skyfleet.algorithms.advantages:RLOO") is advantages.RLOO
