"""Credit assignment: action tokens of graded attempts get the advantage of their attempt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isnan
from pathlib import Path
from typing import Any

import pytest
from tests.trajectories.making import attempt, call_turn, group, played, transcript

from skyfleet.algorithms.advantages import grpo, split_turns
from skyfleet.algorithms.credit_assignment import advantage_metrics, assign_credit
from skyfleet.algorithms.estimator import BatchEstimator
from skyfleet.algorithms.filters import drop_zero_variance, keep_graded, zero_unfinished
from skyfleet.algorithms.sample import Sample, find_action_spans
from skyfleet.chat.transcript import Transcript
from skyfleet.errors import ConfigError
from skyfleet.trajectories.trajectory import Ending, Group, Trajectory, Turn

TWO_TURNS = Transcript(
    token_ids=[1, 2, 3, 4, 5, 6],
    loss_mask=[False, False, True, False, True, True],
    logprobs=[0.0, 0.0, -0.1, 0.0, -0.2, -0.3],
    policy_versions=[4, 3],
)


def groups(*rewards: float | None, ending: Ending = Ending.DONE) -> list[Group]:
    attempts = [attempt(r, transcripts=(transcript(2),), ending=ending) for r in rewards]
    return [Group(task_key="t", env_key="github", trajectories=tuple(attempts))]


def action_advantages(samples: list[Sample]) -> list[list[float]]:
    return [s.select_action_tokens(s.advantages) for s in samples]


def test_action_tokens_have_the_advantage_and_observation_tokens_zero() -> None:
    won = attempt(1.0, transcripts=(TWO_TURNS,))
    (sample,) = assign_credit(
        [Group(task_key="t", env_key="github", trajectories=(won,))], lambda _: [2.0]
    )
    assert sample.token_ids == (1, 2, 3, 4, 5, 6)
    assert sample.advantages == (0.0, 0.0, 2.0, 0.0, 2.0, 2.0)
    assert sample.logprobs == (0.0, 0.0, -0.1, 0.0, -0.2, -0.3)
    assert sample.policy_version == 3  # the oldest
    assert sample.n_action_tokens == 3


@pytest.mark.parametrize(
    ("mask", "spans"),
    [
        ([], []),
        ([0, 0], []),
        ([0, 1, 1], [(1, 3)]),
        ([1, 0, 1, 1, 0, 0, 1], [(0, 1), (2, 4), (6, 7)]),
    ],
)
def test_action_spans_are_the_runs_of_action_tokens(
    mask: list[int], spans: list[tuple[int, int]]
) -> None:
    assert find_action_spans([bool(bit) for bit in mask]) == spans


def test_tokens_after_the_last_action_token_are_cut() -> None:
    longer = replace(
        TWO_TURNS,
        token_ids=[*TWO_TURNS.token_ids, 7, 8],
        loss_mask=[*TWO_TURNS.loss_mask, False, False],
        logprobs=[*TWO_TURNS.logprobs, 0.0, 0.0],
    )
    cut = attempt(0.0, transcripts=(longer,), ending=Ending.CONTEXT_FULL)
    (sample,) = assign_credit(
        [Group(task_key="t", env_key="github", trajectories=(cut,))], lambda _: [1.0]
    )
    assert sample.token_ids == (1, 2, 3, 4, 5, 6)


def test_an_unknown_grade_is_in_no_mean_and_no_sample() -> None:
    samples = assign_credit(groups(1.0, None, 0.0, None, 0.0, 0.0), grpo)
    expected = [[1.5, 1.5], [-0.5, -0.5], [-0.5, -0.5], [-0.5, -0.5]]
    for got, want in zip(action_advantages(samples), expected, strict=True):
        assert got == pytest.approx(want, abs=1e-5)


def test_every_transcript_of_an_attempt_gets_its_advantage() -> None:
    rewritten = attempt(1.0, transcripts=(transcript(1), transcript(3)))
    lost = attempt(0.0, transcripts=(transcript(2),))
    pair = Group(task_key="t", env_key="github", trajectories=(rewritten, lost))
    samples = assign_credit([pair], lambda rewards: [r - 0.5 for r in rewards])
    assert action_advantages(samples) == [[0.5], [0.5, 0.5, 0.5], [-0.5, -0.5]]


def test_a_transcript_without_an_action_token_makes_no_sample() -> None:
    empty = attempt(0.0, transcripts=(transcript(0),), ending=Ending.CONTEXT_FULL)
    won = attempt(1.0, transcripts=(transcript(1),))
    pair = Group(task_key="t", env_key="github", trajectories=(empty, won))
    assert len(assign_credit([pair], grpo)) == 1


def test_a_masked_unfinished_attempt_counts_in_the_mean_and_makes_no_sample() -> None:
    (done,), (cut,) = groups(1.0), groups(0.0, ending=Ending.LENGTH)
    pair = Group(
        task_key="t", env_key="github", trajectories=(*done.trajectories, *cut.trajectories)
    )
    samples = assign_credit([pair], grpo, mask_unfinished=True)
    assert action_advantages(samples) == [[pytest.approx(0.7071, abs=1e-4)] * 2]
    assert len(assign_credit([pair], grpo)) == 2


@pytest.mark.parametrize("n_given", [1, 5])
def test_an_estimator_must_return_one_advantage_per_reward(n_given: int) -> None:
    with pytest.raises(
        ConfigError, match=f"returned {n_given} advantages for a group of 2 rewards"
    ):
        assign_credit(groups(1.0, 0.0), lambda _: [0.5] * n_given)


def test_advantage_metrics_are_means_over_action_tokens_and_reward_metrics_over_attempts() -> None:
    samples = assign_credit(groups(1.0, 0.5), lambda _: [3.0, -1.0])
    assert advantage_metrics(samples) == {
        "loss/num_samples": 2.0,
        "loss/avg_raw_rewards": 0.75,
        "loss/avg_raw_advantages": 1.0,
        "loss/avg_raw_advantages_abs": 2.0,
    }


def test_an_attempt_with_several_samples_counts_once_in_the_mean_reward() -> None:
    rewritten = attempt(1.0, transcripts=(transcript(1), transcript(3)))
    lost = attempt(0.0, transcripts=(transcript(2),))
    pair = Group(task_key="t", env_key="github", trajectories=(rewritten, lost))
    metrics = advantage_metrics(assign_credit([pair], grpo))
    assert (metrics["loss/num_samples"], metrics["loss/avg_raw_rewards"]) == (3.0, 0.5)


def test_the_metrics_of_an_empty_batch_exist_and_are_nan() -> None:
    metrics = advantage_metrics([])
    assert metrics.pop("loss/num_samples") == 0.0
    assert metrics.keys() >= {"loss/avg_raw_rewards", "loss/avg_raw_advantages"}
    assert all(map(isnan, metrics.values()))


def test_attempts_are_grouped_by_task_not_by_position() -> None:
    apart = [*groups(1.0), group([0.0], task_key="other"), *groups(0.0)]
    assert action_advantages(assign_credit(apart, lambda rewards: [r - 0.5 for r in rewards])) == [
        [0.5, 0.5],
        [-0.5, -0.5],
    ]


def test_a_group_with_fewer_than_two_grades_is_dropped_counted_and_warned_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    played = [group([1.0, None, 0.0]), group([1.0, None]), group([None]), group([0.0])]
    kept = keep_graded(played)
    assert [g.rewards for g in kept.groups] == [[1.0, 0.0]]
    assert kept.dropped == {"unknown_grade": 3, "too_few_graded": 3}
    assert "3 groups have fewer than 2 graded attempts" in caplog.text
    assert keep_graded(played, at_least=1).dropped == {"unknown_grade": 3, "too_few_graded": 1}


def test_a_filter_that_drops_nothing_counts_zero() -> None:
    full = [group([1.0, 0.0])]
    assert dict(keep_graded(full).dropped) == {"unknown_grade": 0, "too_few_graded": 0}
    assert dict(drop_zero_variance(full).dropped) == {"zero_variance": 0}


def test_a_group_of_equal_rewards_is_dropped_and_counted() -> None:
    kept = drop_zero_variance([group([1, 1]), group([0, 0, 0]), group([1, 0]), group([0.3, 0.4])])
    assert [g.rewards for g in kept.groups] == [[1, 0], [0.3, 0.4]]
    assert kept.dropped == {"zero_variance": 2}
    assert drop_zero_variance([group([0.3, 0.4])], tolerance=0.2).groups == ()


def test_zeroing_unfinished_attempts_keeps_unknown_rewards_unknown() -> None:
    for ending in (Ending.LENGTH, Ending.CONTEXT_FULL, Ending.TIMEOUT):
        (zeroed,) = zero_unfinished(groups(1.0, None, ending=ending))
        assert [t.reward for t in zeroed.trajectories] == [0.0, None]
        assert zeroed.trajectories[0].success is False
    for ending in (Ending.DONE, Ending.MAX_TURNS):
        (kept,) = zero_unfinished(groups(1.0, None, ending=ending))
        assert [t.reward for t in kept.trajectories] == [1.0, None]


def test_a_sample_with_fields_of_different_length_is_refused() -> None:
    with pytest.raises(
        ValueError, match="task t: tokens, mask, logprobs and advantages differ in length"
    ):
        _sample(token_ids=(1, 2), loss_mask=(False,))
    with pytest.raises(ValueError, match="task t: the first token cannot be an action token"):
        _sample(token_ids=(1,), loss_mask=(True,))
    whole = _sample(token_ids=(1, 2), loss_mask=(False, True))
    for part in ("old_logprobs", "penalties", "values", "returns"):
        wrong: dict[str, Any] = {part: (0.0,)}
        with pytest.raises(
            ValueError, match="task t: old logprobs, penalties or values differ in length"
        ):
            replace(whole, **wrong)


def _sample(*, token_ids: tuple[int, ...], loss_mask: tuple[bool, ...]) -> Sample:
    return Sample(
        task_key="t",
        env_key="github",
        token_ids=token_ids,
        loss_mask=loss_mask,
        logprobs=(-1.0,) * len(token_ids),
        advantages=(1.0,) * len(token_ids),
        policy_version=0,
    )


def turns(*rewards: float) -> tuple[Turn, ...]:
    return tuple(replace(call_turn(), reward=reward) for reward in rewards)


def step_rewards(won: Trajectory) -> list[tuple[float, ...]]:
    """What a batch estimator sees."""
    seen: list[Sample] = []

    def credit(samples: Sequence[Sample]) -> list[Sample]:
        seen.extend(samples)
        return list(samples)

    assign_credit(played(won), BatchEstimator(credit=credit))
    return [sample.step_rewards for sample in seen]


def test_a_batch_estimator_gets_the_step_rewards_one_per_action_span() -> None:
    won = attempt(1.0, transcripts=(TWO_TURNS,), turns=turns(0.25, 0.75))
    assert step_rewards(won) == [(0.25, 0.75)]


def test_step_rewards_follow_the_turns_over_several_transcripts() -> None:
    rewritten = (transcript(3), TWO_TURNS, transcript(1))
    won = attempt(1.0, transcripts=rewritten, turns=turns(0.1, 0.2, 0.3, 0.4))
    assert step_rewards(won) == [(0.1,), (0.2, 0.3), (0.4,)]


def test_an_action_whose_step_did_not_end_in_time_has_the_step_reward_zero() -> None:
    cut = attempt(0.5, transcripts=(TWO_TURNS,), turns=turns(0.5), ending=Ending.TIMEOUT)
    assert step_rewards(cut) == [(0.5, 0.0)]


def test_the_step_reward_of_a_completion_without_tokens_is_kept_in_the_sum() -> None:
    three_completions = replace(TWO_TURNS, policy_versions=[3, 3, 3])
    won = attempt(1.0, transcripts=(three_completions,), turns=turns(0.25, 0.25, 0.5))
    assert step_rewards(won) == [(0.25, 0.75)]


def test_a_sample_of_one_turn_has_the_step_reward_of_that_turn() -> None:
    won = attempt(1.0, transcripts=(TWO_TURNS,), turns=turns(0.25, 0.75))
    samples = assign_credit(played(won), lambda _: [1.0])
    assert [sample.step_rewards for sample in split_turns(samples)] == [(0.25,), (0.75,)]


def test_the_estimator_of_the_documentation_credits_a_turn_with_the_rewards_after_it() -> None:
    page = Path(__file__).parents[2] / "docs" / "algorithms.md"
    section = page.read_text(encoding="utf-8").partition("### Step rewards\n")[2]
    names: dict[str, Any] = {}
    exec(section.partition("```python\n")[2].partition("```")[0], names)
    won = attempt(1.0, transcripts=(TWO_TURNS,), turns=turns(0.25, 0.75))
    samples = assign_credit(played(won), BatchEstimator(credit=names["reward_to_go"]))
    assert action_advantages(samples) == [[1.0, 0.75, 0.75]]
