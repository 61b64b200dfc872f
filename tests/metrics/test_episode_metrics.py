"""Episode metrics, on numbers worked by hand."""

from __future__ import annotations

import pytest
from tests.trajectories.making import attempt, call_turn, played, transcript

from skyfleet.metrics.rollout_metrics import episode_metrics
from skyfleet.trajectories.trajectory import Ending


def test_no_groups_have_no_metrics() -> None:
    assert episode_metrics([]) == {}


def test_turns_and_tools_are_counted_per_environment_and_over_all() -> None:
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


def test_an_episode_that_never_opened_is_counted_apart() -> None:
    unopened = attempt(None, opening=(), ending=Ending.FAILED)
    metrics = episode_metrics(played(unopened, attempt(1.0, turns=(call_turn(),) * 4)))
    assert metrics["environment/github/env_init_failed"] == 1.0
    assert metrics["environment/total_env_init_failed"] == 1.0
    assert metrics["generate/env_init_failures"] == 1.0
    assert metrics["environment/github/num_episodes"] == 1.0
    assert metrics["environment/github/avg_turns"] == 4.0


def test_an_episode_that_failed_later_was_played() -> None:
    metrics = episode_metrics(played(attempt(None, turns=(call_turn(),), ending=Ending.FAILED)))
    assert "environment/github/env_init_failed" not in metrics
    assert metrics["environment/github/num_episodes"] == 1.0


def test_only_sampled_tokens_count_over_all_transcripts() -> None:
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


def test_what_has_nothing_to_average_has_no_key() -> None:
    metrics = episode_metrics(played(attempt(1.0)))
    assert "reward/parse_failure_rate" not in metrics
    assert "environment/github/tool_calls_per_turn" not in metrics
    assert "environment/github/tool_error_rate" not in metrics
    assert not [key for key in metrics if key.endswith("num_tokens")]


def test_endings_are_shares_of_all_episodes() -> None:
    metrics = episode_metrics(played(*[attempt(1.0)] * 3, attempt(0.0, ending=Ending.TIMEOUT)))
    assert metrics["generation/ending_done"] == 0.75
    assert metrics["generation/ending_timeout"] == 0.25
    assert metrics["generation/ending_max_turns"] == 0.0
    assert metrics["generate/trajectory_timeouts"] == 1.0
    assert sum(v for k, v in metrics.items() if k.startswith("generation/ending_")) == 1.0
