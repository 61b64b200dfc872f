"""Batch estimators: advantages per token over a whole batch, and KL in the reward."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.fakes.samples import sample

from skyfleet.algorithms.advantages import (
    distillation,
    grpo,
    normalize_batch,
    reinforce_plus_plus,
    split_turns,
)
from skyfleet.algorithms.credit_assignment import estimate_advantages
from skyfleet.algorithms.estimator import BatchEstimator
from skyfleet.algorithms.kl import adaptive_control, apply_kl_penalty, fixed_control, k1
from skyfleet.algorithms.sample import Sample


def earning(reward: float, mask: str, *, attempt: int = 0, rewards: list[float]) -> Sample:
    """`mask` has a 1 for each action token."""
    loss_mask = [digit == "1" for digit in mask]
    made = sample(range(1, len(mask) + 1), loss_mask, advantage=0.0)
    assert rewards[attempt] == reward
    return replace(made, attempt=attempt, group_rewards=tuple(rewards))


def advantages(samples: list[Sample]) -> list[list[float]]:
    return [s.select_action_tokens(s.advantages) for s in samples]


def test_reinforce_plus_plus_whitens_discounted_returns_over_the_batch() -> None:
    pair = [
        earning(1.0, "011", rewards=[1.0, 0.0]),
        earning(0.0, "0011", attempt=1, rewards=[1.0, 0.0]),
    ]
    made = reinforce_plus_plus(pair, gamma=0.5)
    # Returns 1/2, 1, 0, 0: mean 3/8, sample variance 0.6875 / 3.
    expected = [[0.26112, 1.30558], [-0.78335, -0.78335]]
    for got, want in zip(advantages(made), expected, strict=True):
        assert got == pytest.approx(want, abs=1e-5)


def test_observation_tokens_are_neither_discounted_nor_whitened() -> None:
    """In SkyRL both run over observation tokens too."""
    one_turn = earning(1.0, "0110", rewards=[1.0, 0.0])
    two_turns = earning(1.0, "010001", rewards=[1.0, 0.0])
    other = earning(0.0, "0111", attempt=1, rewards=[1.0, 0.0])
    estimate = partial(reinforce_plus_plus, gamma=0.5)
    assert advantages(estimate([one_turn, other])) == advantages(estimate([two_turns, other]))


def test_batch_normalization_uses_action_tokens_only() -> None:
    """SkyRL takes the mean over padding as well."""
    pair = [
        replace(earning(1.0, "0011", rewards=[1.0]), advantages=(0.0, 0.0, 1.0, 1.0)),
        replace(earning(1.0, "000011", rewards=[1.0]), advantages=(0.0, 0.0, 0.0, 0.0, 3.0, 3.0)),
    ]
    assert advantages(normalize_batch(pair)) == [[-1.0, -1.0], [1.0, 1.0]]
    assert normalize_batch([]) == []


def test_every_turn_becomes_a_sample_with_its_own_advantages() -> None:
    """In older SkyRL a long first turn was cut to the length of the last (#1492)."""
    whole = replace(
        earning(1.0, "0111101", rewards=[1.0]),
        advantages=(0.0, 2.0, 2.0, 2.0, 2.0, 0.0, 2.0),
        old_logprobs=(0.0, -1.0, -2.0, -3.0, -4.0, 0.0, -5.0),
    )
    first, last = split_turns([whole])
    assert first.token_ids == (1, 2, 3, 4, 5)
    assert first.advantages == (0.0, 2.0, 2.0, 2.0, 2.0)
    assert first.old_logprobs == (0.0, -1.0, -2.0, -3.0, -4.0)
    assert last.token_ids == whole.token_ids
    assert last.loss_mask == (False,) * 6 + (True,)
    assert last.advantages == (0.0,) * 6 + (2.0,)
    assert last.penalties == ()
    assert first.group_rewards == last.group_rewards == (1.0,)


def test_kl_penalties_are_per_token_and_subtracted_before_the_group_comparison() -> None:
    group = [
        earning(1.0, "011", rewards=[1.0, 0.0]),
        earning(0.0, "0011", attempt=1, rewards=[1.0, 0.0]),
    ]
    # The fake's own logprobs are -2: k1 is 1, 0 and -1, 0.
    result = apply_kl_penalty(group, [[-3.0, -2.0], [-1.0, -2.0]], k1, coef=0.1)
    first, second = result.samples
    assert first.penalties == pytest.approx((0.0, 0.1, 0.0))
    assert second.penalties == pytest.approx((0.0, 0.0, -0.1, 0.0))
    assert (result.kl, result.kl_max) == (0.0, 1.0)
    # Rewards 0.9 and 0.1: a distance of 0.4 from their mean.
    made = estimate_advantages(result.samples, partial(grpo, norm_by_std=False))
    assert advantages(made)[0] == pytest.approx([0.4, 0.4])
    assert advantages(made)[1] == pytest.approx([-0.4, -0.4])


def test_the_penalties_of_all_sequences_of_an_attempt_add_up() -> None:
    parts = [earning(1.0, "01", rewards=[1.0, 0.0]), earning(1.0, "001", rewards=[1.0, 0.0])]
    other = earning(0.0, "01", attempt=1, rewards=[1.0, 0.0])
    paying = [replace(p, penalties=tuple(0.25 * c for c in p.loss_mask)) for p in parts]
    made = estimate_advantages([*paying, other], partial(grpo, norm_by_std=False))
    assert advantages(made) == [[0.25], [0.25], [-0.25]]


def test_reinforce_plus_plus_has_a_penalty_on_its_own_token() -> None:
    payer = replace(earning(1.0, "011", rewards=[1.0]), penalties=(0.0, 0.0, 0.5))
    other = replace(earning(1.0, "011", rewards=[1.0]), penalties=(0.0, 0.5, 0.0))
    # Rewards 0, 1/2 and -1/2, 1: returns 1/2, 1/2 and 1/2, 1.
    made = advantages(reinforce_plus_plus([payer, other], gamma=1.0))
    assert made[0] == pytest.approx([-0.5, -0.5], abs=1e-5)
    assert made[1] == pytest.approx([-0.5, 1.5], abs=1e-5)


def test_distillation_advantages_are_teacher_minus_student_logprobs() -> None:
    student = earning(0.0, "011", rewards=[0.0])
    result = apply_kl_penalty([student], [[-0.5, -4.0]], k1, coef=1.0)
    (made,) = estimate_advantages(result.samples, BatchEstimator(credit=distillation))
    # Minus (-2 + 0.5) and minus (-2 + 4).
    assert made.advantages == pytest.approx((0.0, 1.5, -2.0))


def test_the_adaptive_coefficient_changes_by_a_clipped_error() -> None:
    control = partial(adaptive_control, kl_target=0.1, horizon=100)
    assert control(0.5, 0.11, 10) == pytest.approx(0.5 * 1.01)
    # The error is clipped to 0.2.
    assert control(0.5, 9.0, 10) == pytest.approx(0.5 * 1.02)
    assert control(0.5, 0.0, 10) == pytest.approx(0.5 * 0.98)
    assert fixed_control(0.5, 9.0, 10) == 0.5


def test_penalties_use_recomputed_old_logprobs_if_there_are_any() -> None:
    recomputed = replace(earning(1.0, "01", rewards=[1.0]), old_logprobs=(0.0, -1.5))
    (paying,) = apply_kl_penalty([recomputed], [[-2.0]], k1, coef=1.0).samples
    assert paying.penalties == (0.0, 0.5)
    assert torch.tensor(paying.logprobs).tolist() == [0.0, -2.0]
