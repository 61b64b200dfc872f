"""GAE and the value loss, on numbers worked by hand."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean, stdev

import pytest
import torch
from tests.fakes.samples import sample

from skyfleet.algorithms.advantages import gae, generalized_advantage
from skyfleet.algorithms.losses.ppo import value_loss
from skyfleet.algorithms.sample import Sample


def valued(mask: str, values: list[float], reward: float) -> Sample:
    """`mask` has a 1 for each action token; `values` holds one value for each of those."""
    made = sample(range(1, len(mask) + 1), [digit == "1" for digit in mask], advantage=0.0)
    return replace(made, values=made.scatter_to_tokens(values), group_rewards=(reward,))


def test_an_advantage_is_the_discounted_sum_of_td_errors() -> None:
    advantages, targets = gae([0.0, 0.0, 1.0], [0.5, 0.2, 0.4], gamma=0.9, lambd=0.5)
    # TD errors 0.9*0.2 - 0.5 = -0.32, 0.9*0.4 - 0.2 = 0.16, 1 - 0.4 = 0.6; each after counts 0.45.
    assert advantages == pytest.approx([-0.32 + 0.45 * 0.43, 0.16 + 0.45 * 0.6, 0.6], abs=1e-9)
    assert targets == pytest.approx([0.3735, 0.63, 1.0], abs=1e-9)


def test_with_lambda_and_gamma_one_the_target_is_the_return() -> None:
    _, targets = gae([0.0, -0.25, 1.0], [0.9, -3.0, 0.1], gamma=1.0, lambd=1.0)
    assert targets == pytest.approx([0.75, 0.75, 1.0])


def test_advantages_are_whitened_and_targets_are_not() -> None:
    pair = [
        valued("0110", [0.5, 0.2], 1.0),
        valued("010011", [0.0, 0.4, 0.0], 0.0),
    ]
    first, second = generalized_advantage(pair, gamma=1.0, lambd=1.0)
    # 1 - 0.5, 1 - 0.2; 0 - 0, 0 - 0.4, 0 - 0.
    raw = [0.5, 0.8, 0.0, -0.4, 0.0]
    mean, deviation = fmean(raw), stdev(raw)
    assert (mean, deviation) == pytest.approx((0.18, 0.4711688))
    expected = [(a - mean) / deviation for a in raw]
    assert first.advantages == pytest.approx([0.0, *expected[:2], 0.0], abs=1e-5)
    assert second.advantages == pytest.approx([0.0, expected[2], 0.0, 0.0, *expected[3:]], abs=1e-5)
    assert first.returns == pytest.approx((0.0, 1.0, 1.0, 0.0))
    assert second.returns == (0.0,) * 6


def test_observation_tokens_are_not_in_the_recursion() -> None:
    """In SkyRL the recursion runs over observation tokens too."""
    other = valued("011", [0.1, 0.3], 0.0)
    one_turn = generalized_advantage([valued("011", [0.5, 0.2], 1.0), other], gamma=0.5, lambd=0.9)
    two_turns = generalized_advantage(
        [valued("010001", [0.5, 0.2], 1.0), other], gamma=0.5, lambd=0.9
    )
    for one, same in zip(one_turn, two_turns, strict=True):
        assert one.select_action_tokens(one.advantages) == same.select_action_tokens(
            same.advantages
        )
        assert one.select_action_tokens(one.returns) == same.select_action_tokens(same.returns)


def test_a_penalty_is_a_negative_reward_on_its_own_token() -> None:
    paying = replace(valued("011", [0.0, 0.0], 1.0), penalties=(0.0, 0.25, 0.5))
    (made,) = generalized_advantage([paying], gamma=1.0, lambd=1.0)
    assert made.returns == (0.0, 0.25, 0.5)  # 1 - 0.25 - 0.5, and 1 - 0.5


def test_samples_without_values_come_back_unchanged() -> None:
    waiting = [replace(valued("011", [0.0, 0.0], 1.0), values=())]
    assert generalized_advantage(waiting, gamma=1.0, lambd=1.0) == waiting


def test_a_clipped_value_has_no_gradient() -> None:
    values = torch.tensor([0.5, 0.9, 0.9, -0.5], requires_grad=True)
    old, returns = torch.tensor([0.4, 0.4, 0.4, 0.4]), torch.tensor([1.0, 1.0, 0.0, 1.0])
    output = value_loss(values, old, returns, value_clip=0.2)
    # Free: 0.5 is 0.1 from 0.4. Held at 0.6: (0.6-1)^2 is worse than (0.9-1)^2. Not held: 0.9 is
    # worse than 0.6 for a return of 0. Not held: -0.5 is worse than 0.2 for a return of 1.
    assert output.loss_T.tolist() == pytest.approx([0.125, 0.08, 0.405, 1.125])
    assert output.metrics_T["values_clipfrac"].tolist() == [0.0, 1.0, 0.0, 0.0]
    (grad,) = torch.autograd.grad(output.loss_T.sum(), values)
    assert grad.tolist() == pytest.approx([-0.5, 0.0, 0.9, -1.5])


def test_without_a_clip_the_loss_is_half_the_squared_error() -> None:
    output = value_loss(
        torch.tensor([3.0]), torch.tensor([0.0]), torch.tensor([1.0]), value_clip=None
    )
    assert output.loss_T.tolist() == [2.0]
    assert output.metrics_T == {}
