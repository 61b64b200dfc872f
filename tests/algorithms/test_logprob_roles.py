"""Losses use the right one of current, old and behaviour logprobs."""

from __future__ import annotations

from math import exp, log

import pytest
import torch
from tests.algorithms.test_credit_assignment import groups

from skyfleet.algorithms.filters import drop_zero_variance
from skyfleet.algorithms.losses.covariance import covariances
from skyfleet.algorithms.losses.loss import LossInputs
from skyfleet.algorithms.losses.off_policy import correct
from skyfleet.algorithms.losses.policy_gradient import dppo, rollout_is
from skyfleet.algorithms.losses.ppo import gspo
from skyfleet.config.algorithm import OffPolicyCorrection

NOW, OLD, SAMPLED = [-1.0, -0.5, -2.0], [-1.1, -0.7, -1.9], [-1.4, -0.2, -1.6]


def inputs(*, advantages: tuple[float, ...] = (1.0, -2.0, 3.0)) -> LossInputs:
    return LossInputs(
        tokens_T=torch.arange(3),
        logprobs_T=torch.tensor(NOW, requires_grad=True),
        old_logprobs_T=torch.tensor(OLD),
        behaviour_logprobs_T=torch.tensor(SAMPLED),
        advantages_T=torch.tensor(advantages),
        lengths_B=torch.tensor([2, 1]),
    )


def test_gspo_uses_old_logprobs() -> None:
    loss_T = gspo(inputs(), eps_clip_low=0.9, eps_clip_high=0.9).loss_T
    first, second = exp((0.1 + 0.2) / 2), exp(-0.1)
    assert loss_T.tolist() == pytest.approx([-first, 2 * first, -3 * second])


def test_a_correction_uses_old_over_behaviour_logprobs() -> None:
    rules = OffPolicyCorrection(tis_ratio_type="token", token_tis_ratio_clip_high=1.1)
    weights_T = correct(inputs(), rules).weights_T
    assert weights_T.tolist() == pytest.approx([1.1, exp(-0.5), exp(-0.3)])


def test_covariances_are_of_centred_advantages() -> None:
    centred = [a - 2 / 3 for a in (1.0, -2.0, 3.0)]
    mean = sum(NOW) / 3
    expected = [a * (p - mean) for a, p in zip(centred, NOW, strict=True)]
    assert covariances(inputs()).tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("low", "high", "dropped"), [(0.1, 0.9, [0, 1]), (0.9, 0.1, [1, 0])])
def test_dppo_has_one_bound_per_sign_of_the_advantage(
    low: float, high: float, dropped: list[float]
) -> None:
    given = LossInputs(
        tokens_T=torch.arange(2),
        logprobs_T=torch.tensor([log(0.8), log(0.2)], requires_grad=True),
        old_logprobs_T=torch.tensor([log(0.5), log(0.5)]),
        behaviour_logprobs_T=torch.tensor([log(0.5), log(0.5)]),
        advantages_T=torch.tensor([1.0, -1.0]),
        lengths_B=torch.tensor([2]),
    )
    output = dppo(given, dppo_type="binary_tv", delta_low=low, delta_high=high)
    assert output.metrics_T["ppo_clip_ratio"].tolist() == dropped


def test_the_bounds_of_a_token_mask_are_inclusive() -> None:
    given = LossInputs(
        tokens_T=torch.arange(3),
        logprobs_T=torch.zeros(3, requires_grad=True),
        old_logprobs_T=torch.log(torch.tensor([0.5, 2.0, 2.1], dtype=torch.float64)),
        behaviour_logprobs_T=torch.zeros(3, dtype=torch.float64),
        advantages_T=torch.ones(3),
        lengths_B=torch.tensor([3]),
    )
    ratios = given.old_logprobs_T.exp().tolist()
    rules = OffPolicyCorrection(
        token_mask_is_threshold_low=ratios[0], token_mask_is_threshold_high=ratios[1]
    )
    assert correct(given, rules).weights_T.tolist() == [1.0, 1.0, 0.0]


def test_the_bounds_of_rollout_is_are_exclusive() -> None:
    given = LossInputs(
        tokens_T=torch.arange(3),
        logprobs_T=torch.tensor([0.0, log(0.75), log(0.5)], requires_grad=True),
        old_logprobs_T=torch.zeros(3),
        behaviour_logprobs_T=torch.zeros(3),
        advantages_T=torch.ones(3),
        lengths_B=torch.tensor([3]),
    )
    clipped = rollout_is(given, eps_clip_low=0.5, eps_clip_high=0.5).metrics_T["ppo_clip_ratio"]
    assert clipped.tolist() == [0.0, 0.0, 1.0]


def test_with_zero_tolerance_equal_rewards_are_still_dropped() -> None:
    kept = drop_zero_variance([*groups(0.5, 0.5), *groups(0.5, 0.6)], tolerance=0.0)
    assert [list(group.rewards) for group in kept.groups] == [[0.5, 0.6]]
