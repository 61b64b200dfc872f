"""Reward metrics, on numbers worked by hand."""

from __future__ import annotations

import pytest
from tests.trajectories.making import attempt, group

from skyfleet.metrics.rollout_metrics import reward_metrics, trained_reward_metrics
from skyfleet.trajectories.trajectory import Group


def test_no_groups_have_no_metrics() -> None:
    assert reward_metrics([]) == {}


def test_nothing_graded_is_counted_and_nothing_else() -> None:
    assert reward_metrics([group([None, None]), group([None, None])]) == {
        "reward/unknown_grades": 4.0
    }


@pytest.mark.parametrize(
    ("rewards", "variance"),
    [([1, 0, 0, 0], 0.1875), ([1, 1, 0, 0], 0.25), ([1, 1, 1, 0], 0.1875), ([1, 1, 1, 1], 0.0)],
)
def test_variance_is_of_the_population(rewards: list[float], variance: float) -> None:
    assert reward_metrics([group(rewards)])["reward/github/variance_per_prompt"] == variance


def test_variance_and_signal_are_means_over_prompts() -> None:
    metrics = reward_metrics([group([1, 0, 0, 0]), group([1, 1, 0, 0]), group([0, 0, 0, 0])])
    assert metrics["reward/github/variance_per_prompt"] == pytest.approx(0.4375 / 3)
    assert metrics["reward/github/signal_ratio"] == pytest.approx(2 / 3)
    assert metrics["reward/github/pass_at_4"] == pytest.approx(2 / 3)


def test_equal_rewards_give_no_signal_whatever_their_binary_digits() -> None:
    assert reward_metrics([group([0.1, 0.1, 0.1])])["reward/github/signal_ratio"] == 0.0


def test_unknown_grades_are_in_no_mean() -> None:
    metrics = reward_metrics([group([1.0, None, 0.5, None]), group([None] * 4)])
    assert metrics == {
        "generation/avg_reward": 0.75,
        "generation/success_rate": 0.5,
        "reward/unknown_grades": 6.0,
        "reward/avg_pass_at_4": 1.0,
        "reward/avg_raw_reward": 0.75,
        "reward/mean_positive_reward": 0.75,
        "reward/github/pass_at_4": 1.0,
        "reward/github/mean_positive_reward": 0.75,
        "reward/github/variance_per_prompt": 0.0625,
        "reward/github/signal_ratio": 1.0,
    }


def test_one_graded_attempt_has_no_variance_to_speak_of() -> None:
    metrics = reward_metrics([group([1.0, None])])
    assert "reward/github/variance_per_prompt" not in metrics
    assert "reward/github/signal_ratio" not in metrics


def test_a_partial_reward_is_not_a_pass() -> None:
    assert reward_metrics([group([0.9, 0.0])])["reward/avg_pass_at_2"] == 0.0


def test_a_pass_is_what_the_verifier_called_a_success() -> None:
    won = Group(
        task_key="t", env_key="github", trajectories=(attempt(0.9, success=True), attempt(0.0))
    )
    assert reward_metrics([won])["reward/github/pass_at_2"] == 1.0


def test_mean_positive_reward_leaves_out_zero_and_penalty() -> None:
    metrics = reward_metrics([group([-1.0, 0.0, 0.5, 1.0])])
    assert metrics["reward/mean_positive_reward"] == 0.75
    assert metrics["reward/avg_raw_reward"] == 0.125
    assert reward_metrics([group([0.0, 0.0])])["reward/mean_positive_reward"] == 0.0


def test_the_overall_pass_rate_is_the_environments_recombined() -> None:
    github = [group([1, 0]), group([0, 0]), group([0, 1])]
    metrics = reward_metrics([*github, group([0, 0], env_key="a/b")])
    assert metrics["reward/github/pass_at_2"] == pytest.approx(2 / 3)
    assert metrics["reward/a_b/pass_at_2"] == 0.0
    assert metrics["reward/avg_pass_at_2"] == pytest.approx((3 * 2 / 3 + 1 * 0.0) / 4)


def test_trained_rewards_are_those_of_the_groups_that_are_left() -> None:
    metrics = trained_reward_metrics([group([1.0, 0.0, 0.5, None])])
    assert metrics == {"train/avg_reward": 0.5, "train/min_reward": 0.0, "train/max_reward": 1.0}
    assert trained_reward_metrics([]) == {}
