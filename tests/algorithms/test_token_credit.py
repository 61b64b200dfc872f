"""Credit that is found over a whole batch, token by token."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.fakes.samples import sample

from skyfleet.algorithms.advantages import (
    BatchEstimator,
    distillation,
    grpo,
    normalize_batch,
    reinforce_plus_plus,
    split_turns,
)
from skyfleet.algorithms.credit_assignment import credit
from skyfleet.algorithms.kl import adaptive_control, fixed_control, k1, penalised
from skyfleet.algorithms.sample import Sample


def earning(reward: float, mask: str, *, attempt: int = 0, rewards: list[float]) -> Sample:
    """`mask` has a 1 for each token the policy chose."""
    chosen = [digit == "1" for digit in mask]
    made = sample(range(1, len(mask) + 1), chosen, advantage=0.0)
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


def test_what_an_agent_hears_between_its_turns_neither_discounts_nor_whitens() -> None:
    """In SkyRL both run over observation tokens too."""
    spoken = earning(1.0, "0110", rewards=[1.0, 0.0])
    heard = earning(1.0, "010001", rewards=[1.0, 0.0])
    other = earning(0.0, "0111", attempt=1, rewards=[1.0, 0.0])
    estimate = partial(reinforce_plus_plus, gamma=0.5)
    assert advantages(estimate([spoken, other])) == advantages(estimate([heard, other]))


def test_normalising_looks_at_chosen_tokens_only() -> None:
    """SkyRL takes the mean over padding as well."""
    pair = [
        replace(earning(1.0, "0011", rewards=[1.0]), advantages=(0.0, 0.0, 1.0, 1.0)),
        replace(earning(1.0, "000011", rewards=[1.0]), advantages=(0.0, 0.0, 0.0, 0.0, 3.0, 3.0)),
    ]
    assert advantages(normalize_batch(pair)) == [[-1.0, -1.0], [1.0, 1.0]]
    assert normalize_batch([]) == []


def test_every_turn_becomes_a_sample_with_all_of_its_own_credit() -> None:
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


def test_kl_in_reward_is_paid_token_by_token_before_the_group_is_compared() -> None:
    group = [
        earning(1.0, "011", rewards=[1.0, 0.0]),
        earning(0.0, "0011", attempt=1, rewards=[1.0, 0.0]),
    ]
    # The fake's own logprobs are -2: k1 is 1, 0 and -1, 0.
    result = penalised(group, [[-3.0, -2.0], [-1.0, -2.0]], k1, coef=0.1)
    first, second = result.samples
    assert first.penalties == pytest.approx((0.0, 0.1, 0.0))
    assert second.penalties == pytest.approx((0.0, 0.0, -0.1, 0.0))
    assert (result.kl, result.kl_max) == (0.0, 1.0)
    # Rewards 0.9 and 0.1: a distance of 0.4 from their mean.
    made = credit(result.samples, partial(grpo, norm_by_std=False))
    assert advantages(made)[0] == pytest.approx([0.4, 0.4])
    assert advantages(made)[1] == pytest.approx([-0.4, -0.4])


def test_an_attempt_in_several_sequences_pays_for_all_of_them() -> None:
    parts = [earning(1.0, "01", rewards=[1.0, 0.0]), earning(1.0, "001", rewards=[1.0, 0.0])]
    other = earning(0.0, "01", attempt=1, rewards=[1.0, 0.0])
    paying = [replace(p, penalties=tuple(0.25 * c for c in p.loss_mask)) for p in parts]
    made = credit([*paying, other], partial(grpo, norm_by_std=False))
    assert advantages(made) == [[0.25], [0.25], [-0.25]]


def test_reinforce_plus_plus_sees_a_penalty_where_it_arose() -> None:
    payer = replace(earning(1.0, "011", rewards=[1.0]), penalties=(0.0, 0.0, 0.5))
    other = replace(earning(1.0, "011", rewards=[1.0]), penalties=(0.0, 0.5, 0.0))
    # Rewards 0, 1/2 and -1/2, 1: returns 1/2, 1/2 and 1/2, 1.
    made = advantages(reinforce_plus_plus([payer, other], gamma=1.0))
    assert made[0] == pytest.approx([-0.5, -0.5], abs=1e-5)
    assert made[1] == pytest.approx([-0.5, 1.5], abs=1e-5)


def test_a_student_gains_where_the_teacher_finds_the_token_likelier() -> None:
    student = earning(0.0, "011", rewards=[0.0])
    result = penalised([student], [[-0.5, -4.0]], k1, coef=1.0)
    (made,) = credit(result.samples, BatchEstimator(credit=distillation))
    # Minus (-2 + 0.5) and minus (-2 + 4).
    assert made.advantages == pytest.approx((0.0, 1.5, -2.0))


def test_the_adaptive_coefficient_follows_the_kl_slowly() -> None:
    control = partial(adaptive_control, kl_target=0.1, horizon=100)
    assert control(0.5, 0.11, 10) == pytest.approx(0.5 * 1.01)
    # An error counts for a fifth at most.
    assert control(0.5, 9.0, 10) == pytest.approx(0.5 * 1.02)
    assert control(0.5, 0.0, 10) == pytest.approx(0.5 * 0.98)
    assert fixed_control(0.5, 9.0, 10) == 0.5


def test_penalties_are_those_of_the_policy_as_the_step_began_where_it_was_asked() -> None:
    asked = replace(earning(1.0, "01", rewards=[1.0]), old_logprobs=(0.0, -1.5))
    (paying,) = penalised([asked], [[-2.0]], k1, coef=1.0).samples
    assert paying.penalties == (0.0, 0.5)
    assert torch.tensor(paying.logprobs).tolist() == [0.0, -2.0]
