"""Losses, KL estimators and reductions on numbers worked by hand."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log
from typing import get_args

import pytest
import torch

from skyfleet.algorithms.kl import absolute, get_kl_estimator, k1, k2, k3
from skyfleet.algorithms.losses.loss import LossInputs
from skyfleet.algorithms.losses.policy_gradient import cross_entropy
from skyfleet.algorithms.losses.ppo import ppo_clip
from skyfleet.algorithms.reduction import (
    build_reduction,
    prompt_mean,
    seq_mean_token_sum_norm,
    sequence_mean,
    token_mean,
    token_mean_legacy,
)
from skyfleet.config.algorithm import LossReduction
from skyfleet.errors import ConfigError


def inputs(ratios: list[float], advantages: list[float]) -> LossInputs:
    """One sequence whose behaviour and old logprobs are -1."""
    sampled = torch.full((len(ratios),), -1.0)
    return LossInputs(
        tokens_T=torch.arange(len(ratios)),
        logprobs_T=torch.tensor([log(r) - 1.0 for r in ratios], requires_grad=True),
        old_logprobs_T=sampled,
        behaviour_logprobs_T=sampled,
        advantages_T=torch.tensor(advantages),
        lengths_B=torch.tensor([len(ratios)]),
    )


def test_ppo_clips_only_tokens_that_would_gain_outside_the_clip_range() -> None:
    given = inputs([1.0, 1.5, 1.5, 0.5, 0.5], [2.0, 1.0, -1.0, 1.0, -1.0])
    output = ppo_clip(given, eps_clip_low=0.2, eps_clip_high=0.3)
    # min(rA, clip(r)A) is 2, 1.3, -1.5, 0.5, -0.8; the loss is its negative.
    assert output.loss_T.tolist() == pytest.approx([-2.0, -1.3, 1.5, -0.5, 0.8])
    assert output.metrics_T["ppo_clip_ratio"].tolist() == [0.0, 1.0, 0.0, 0.0, 1.0]
    output.loss_T.sum().backward()
    assert given.logprobs_T.grad is not None
    # A clipped token has no gradient; the others have -rA.
    assert given.logprobs_T.grad.tolist() == pytest.approx([-2.0, 0.0, 1.5, -0.5, 0.0])


def test_ppo_is_finite_for_extreme_ratios() -> None:
    given = replace(
        inputs([1.0, 1.0], [-1.0, -1.0]),
        logprobs_T=torch.tensor([0.0, -200.0], requires_grad=True),
        old_logprobs_T=torch.tensor([-200.0, 0.0]),
    )
    loss_T = ppo_clip(given, eps_clip_low=0.2, eps_clip_high=0.2).loss_T
    assert loss_T.tolist() == pytest.approx([exp(20), 0.8])


def test_cross_entropy_is_the_negative_logprob_for_any_advantage() -> None:
    given = inputs([1.0, exp(-1)], [1.0, -3.0])
    assert cross_entropy(given).loss_T.tolist() == pytest.approx([1.0, 2.0])


def test_kl_estimators_and_their_gradients() -> None:
    reference = torch.tensor([-1.0, -1.0])
    for estimate, values, gradients in (
        (k1, [0.5, -1.0], [1.0, 1.0]),
        (absolute, [0.5, 1.0], [1.0, -1.0]),
        (k2, [0.125, 0.5], [0.5, -1.0]),
        # With d = ref - logprob: exp(d) - d - 1, and 1 - exp(d).
        (k3, [exp(-0.5) - 0.5, exp(1) - 2], [1 - exp(-0.5), 1 - exp(1)]),
    ):
        logprobs = torch.tensor([-0.5, -2.0], requires_grad=True)
        kl = estimate(logprobs, reference)
        kl.sum().backward()
        assert kl.tolist() == pytest.approx(values)
        assert logprobs.grad is not None
        assert logprobs.grad.tolist() == pytest.approx(gradients)


def test_k3_is_clamped_for_a_distant_reference() -> None:
    assert k3(torch.tensor([-500.0]), torch.tensor([0.0])).tolist() == [10.0]


def test_reductions_of_one_and_three_tokens() -> None:
    assert token_mean([1, 3]) == [0.25, 0.25]
    assert sequence_mean([1, 3]) == [1 / 2, 1 / 6]
    assert seq_mean_token_sum_norm([1, 3], max_seq_len=10) == [1 / 20, 1 / 20]


def test_prompt_mean_weights_prompts_equally_in_any_order() -> None:
    # Two prompts: a has 1 + 4 tokens, b has 3.
    assert prompt_mean([1, 3, 4], ["a", "b", "a"]) == [1 / 10, 1 / 6, 1 / 10]


def test_the_legacy_token_mean_is_a_mean_of_block_means() -> None:
    # Blocks of 1 + 3 and 6 tokens; each block is half.
    assert token_mean_legacy([1, 3, 6], block_size=2) == [1 / 8, 1 / 8, 1 / 12]
    assert token_mean_legacy([1, 3], block_size=1) == sequence_mean([1, 3])


def test_an_unknown_reduction_is_refused_with_the_known_names() -> None:
    for name in get_args(LossReduction):
        weights = build_reduction(name, max_seq_len=10, block_size=2)([1, 3], ["a", "a"])
        expected = {"sequence_mean": [1 / 2, 1 / 6], "seq_mean_token_sum_norm": [1 / 20, 1 / 20]}
        assert weights == expected.get(name, [0.25, 0.25])
    with pytest.raises(ConfigError, match=r"set trainer\.algorithm\.max_seq_len"):
        build_reduction("seq_mean_token_sum_norm", max_seq_len=None)
    with pytest.raises(ConfigError, match=r"loss_reduction='mean'; choose from \["):
        build_reduction("mean", max_seq_len=None)
    with pytest.raises(ConfigError, match=r"kl_estimator_type='k4'; choose from \['abs'"):
        get_kl_estimator("k4")
