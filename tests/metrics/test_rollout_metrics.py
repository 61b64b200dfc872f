"""Rollout metrics, on numbers worked by hand."""

from __future__ import annotations

from dataclasses import replace
from math import isnan

import pytest
from tests.trajectories.making import attempt, call_turn, group, played, transcript

from skyfleet.chat.transcript import Transcript
from skyfleet.metrics.rollout_metrics import (
    episode_metrics,
    metric_key,
    reward_metrics,
    trained_reward_metrics,
)
from skyfleet.trajectories.trajectory import Ending, Failure, Group


def test_a_slash_inside_a_part_does_not_add_a_level() -> None:
    assert metric_key("reward", "google/maps", "variance_per_prompt") == (
        "reward/google_maps/variance_per_prompt"
    )
    assert metric_key("timing", "generate") == "timing/generate"


def test_a_step_without_groups_has_the_metrics_of_the_seeds_without_a_value() -> None:
    metrics = reward_metrics([]) | episode_metrics([]) | trained_reward_metrics([])
    assert metrics.pop("reward/unknown_grades") == 0.0
    assert metrics.keys() == {
        *("generation/avg_reward", "generation/success_rate", "reward/avg_raw_reward"),
        *("train/avg_reward", "train/min_reward", "train/max_reward"),
        "reward/parse_failure_rate",
    }
    assert all(map(isnan, metrics.values()))


def test_ungraded_groups_only_count_unknown_grades() -> None:
    metrics = reward_metrics([group([None, None]), group([None, None])])
    assert metrics.pop("reward/unknown_grades") == 4.0
    assert all(map(isnan, metrics.values()))


@pytest.mark.parametrize(
    ("rewards", "variance"),
    [([1, 0, 0, 0], 0.1875), ([1, 1, 0, 0], 0.25), ([1, 1, 1, 0], 0.1875), ([1, 1, 1, 1], 0.0)],
)
def test_variance_is_the_population_variance(rewards: list[float], variance: float) -> None:
    assert reward_metrics([group(rewards)])["reward/github/variance_per_prompt"] == variance


def test_variance_and_signal_are_means_over_prompts() -> None:
    metrics = reward_metrics([group([1, 0, 0, 0]), group([1, 1, 0, 0]), group([0, 0, 0, 0])])
    assert metrics["reward/github/variance_per_prompt"] == pytest.approx(0.4375 / 3)
    assert metrics["reward/github/signal_ratio"] == pytest.approx(2 / 3)
    assert metrics["reward/github/pass_at_4"] == pytest.approx(2 / 3)


def test_equal_rewards_have_no_variance_despite_rounding() -> None:
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


def test_a_single_graded_attempt_has_no_variance() -> None:
    metrics = reward_metrics([group([1.0, None])])
    assert "reward/github/variance_per_prompt" not in metrics
    assert "reward/github/signal_ratio" not in metrics


def test_a_partial_reward_is_not_a_pass() -> None:
    assert reward_metrics([group([0.9, 0.0])])["reward/avg_pass_at_2"] == 0.0


def test_a_pass_is_the_verifiers_success_whatever_the_reward() -> None:
    won = Group(
        task_key="t", env_key="github", trajectories=(attempt(0.9, success=True), attempt(0.0))
    )
    assert reward_metrics([won])["reward/github/pass_at_2"] == 1.0


def test_mean_positive_reward_is_skyrls_mean_of_the_reward_clipped_at_zero() -> None:
    metrics = reward_metrics([group([-1.0, 0.0, 0.5, 1.0])])
    assert metrics["reward/mean_positive_reward"] == 0.375
    assert metrics["reward/github/mean_positive_reward"] == 0.375
    assert metrics["reward/avg_raw_reward"] == 0.125
    assert reward_metrics([group([0.0, 0.0])])["reward/mean_positive_reward"] == 0.0


def test_the_overall_pass_rate_is_the_weighted_mean_of_the_environments() -> None:
    github = [group([1, 0]), group([0, 0]), group([0, 1])]
    metrics = reward_metrics([*github, group([0, 0], env_key="a/b")])
    assert metrics["reward/github/pass_at_2"] == pytest.approx(2 / 3)
    assert metrics["reward/a_b/pass_at_2"] == 0.0
    assert metrics["reward/avg_pass_at_2"] == pytest.approx((3 * 2 / 3 + 1 * 0.0) / 4)


def test_train_rewards_are_those_of_the_groups_given() -> None:
    metrics = trained_reward_metrics([group([1.0, 0.0, 0.5, None])])
    assert metrics == {"train/avg_reward": 0.5, "train/min_reward": 0.0, "train/max_reward": 1.0}


def test_turns_and_tool_calls_are_counted_per_environment_and_overall() -> None:
    metrics = episode_metrics(
        played(
            attempt(1.0, turns=(call_turn(), call_turn(is_error=True), call_turn())),
            attempt(0.0, turns=(call_turn(malformed=True),)),
            attempt(0.0, env_key="mail", turns=(call_turn(is_error=True),)),
        )
    )
    github = {k.split("/")[2]: v for k, v in metrics.items() if k.startswith("environment/github/")}
    assert github == {
        "num_episodes": 2.0,
        "avg_turns": 2.0,
        "min_turns": 1.0,
        "max_turns": 3.0,
        "avg_tool_calls": 1.5,
        "tool_calls_per_turn": 0.75,
        "avg_tool_errors": 0.5,
        "total_tool_errors": 1.0,
        "tool_error_rate": pytest.approx(1 / 3),
    }
    assert metrics["environment/total_episodes"] == 3.0
    assert metrics["environment/avg_turns"] == pytest.approx(5 / 3)
    assert metrics["environment/tool_calls_per_turn"] == pytest.approx(4 / 5)
    assert metrics["environment/tool_error_rate"] == pytest.approx(2 / 4)
    assert metrics["environment/total_env_init_failed"] == 0.0
    assert metrics["reward/parse_failure_rate"] == pytest.approx(1 / 5)


def test_a_failed_environment_start_is_counted_and_left_out_of_the_means() -> None:
    unopened = attempt(None, prompt=(), ending=Ending.FAILED)
    metrics = episode_metrics(played(unopened, attempt(1.0, turns=(call_turn(),) * 4)))
    assert metrics["environment/github/env_init_failed"] == 1.0
    assert metrics["environment/total_env_init_failed"] == 1.0
    assert not [key for key in metrics if key.startswith("generate/env_init")]
    assert metrics["environment/github/num_episodes"] == 1.0
    assert metrics["environment/github/avg_turns"] == 4.0


def test_an_episode_that_fails_after_its_start_counts_as_an_episode() -> None:
    metrics = episode_metrics(played(attempt(None, turns=(call_turn(),), ending=Ending.FAILED)))
    assert "environment/github/env_init_failed" not in metrics
    assert metrics["environment/github/num_episodes"] == 1.0


def test_token_counts_are_sums_over_the_transcripts_of_an_episode() -> None:
    metrics = episode_metrics(
        played(
            attempt(1.0, transcripts=(transcript(3), transcript(5))),
            attempt(0.0, transcripts=(transcript(2),)),
            attempt(None, transcripts=(transcript(2),)),
        )
    )
    assert metrics["generate/min_num_tokens"] == 2.0
    assert metrics["generate/max_num_tokens"] == 8.0
    assert metrics["generate/avg_num_tokens"] == 4.0
    assert metrics["generate/std_num_tokens"] == pytest.approx(8**0.5)
    assert metrics["generate/avg_tokens_non_zero_rewards"] == 8.0
    assert metrics["generate/avg_tokens_zero_rewards"] == 2.0
    for which in ("min", "max", "avg", "std"):
        response, sampled = (f"generate/{which}_{n}" for n in ("num_tokens", "assistant_tokens"))
        assert metrics[sampled] == metrics[response]


def test_a_response_includes_observations_between_its_turns_and_not_the_last_one() -> None:
    """Prompt 2, sampled 3, observation 4, sampled 1, observation 5: 8 response tokens, 4 sampled."""
    mask = [False] * 2 + [True] * 3 + [False] * 4 + [True] + [False] * 5
    two_turns = Transcript(token_ids=[1] * 15, loss_mask=mask, logprobs=[0.0] * 15)
    nothing_sampled = Transcript(token_ids=[1] * 2, loss_mask=[False] * 2, logprobs=[0.0] * 2)
    metrics = episode_metrics(
        played(attempt(1.0, transcripts=(two_turns,)), attempt(0.0, transcripts=(nothing_sampled,)))
    )
    assert metrics["generate/max_num_tokens"] == 8.0
    assert metrics["generate/max_assistant_tokens"] == 4.0
    assert metrics["generate/min_num_tokens"] == metrics["generate/min_assistant_tokens"] == 0.0


def test_a_penalty_is_in_neither_token_mean_by_reward() -> None:
    metrics = episode_metrics(played(attempt(-1.0, transcripts=(transcript(3),))))
    assert not [key for key in metrics if key.startswith("generate/avg_tokens_")]


def test_info_values_are_averaged_over_the_turns_that_report_them() -> None:
    turns = tuple(
        replace(call_turn(), info=info)
        for info in ({"hints": 2.0, "a/b": 1.0}, {}, {"hints": 4.0, "avg_turns": 99.0})
    )
    metrics = episode_metrics(played(attempt(1.0, turns=turns), attempt(1.0, env_key="mail")))
    assert metrics["environment/github/hints"] == 3.0
    assert metrics["environment/github/a_b"] == 1.0
    assert metrics["environment/github/avg_turns"] == 3.0
    assert "environment/mail/hints" not in metrics


def test_a_mean_over_nothing_has_no_key() -> None:
    metrics = episode_metrics(played(attempt(1.0)))
    assert isnan(metrics["reward/parse_failure_rate"])
    assert "environment/github/tool_calls_per_turn" not in metrics
    assert "environment/github/tool_error_rate" not in metrics
    assert not [key for key in metrics if key.endswith("num_tokens")]


def test_endings_are_shares_of_all_episodes() -> None:
    metrics = episode_metrics(played(*[attempt(1.0)] * 3, attempt(0.0, ending=Ending.TIMEOUT)))
    assert metrics["generate/ending_done"] == 0.75
    assert metrics["generate/ending_timeout"] == 0.25
    assert metrics["generate/ending_max_turns"] == 0.0
    assert metrics["generate/trajectory_timeouts"] == 1.0
    assert sum(v for k, v in metrics.items() if k.startswith("generate/ending_")) == 1.0


def test_failures_of_users_are_counted_by_kind_and_their_tokens_are_summed() -> None:
    turn = replace(call_turn(), info={"user_sampled_tokens": 3.0, "score": 0.5})
    failure = Failure(kind="UserFailedError", detail="the simulated user failed (loop): it repeats")
    failed = replace(attempt(None, turns=(turn, turn)), failure=failure)
    metrics = episode_metrics(played(failed, attempt(1.0, turns=(turn,))))
    assert metrics["environment/github/user_failures"] == 1.0
    assert metrics["environment/github/user_failures_loop"] == 1.0
    assert metrics["environment/github/user_sampled_tokens"] == 9.0
    assert metrics["environment/github/score"] == 0.5
    assert "environment/github/user_failures" not in episode_metrics(played(attempt(1.0)))
